import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.outer_optimizer import OUTER_OPTIMIZERS, OuterOptimizer

from .workers import bits, mixed_model


def made(name: str, learning_rate: float = 1.0, momentum: float = 0.0) -> OuterOptimizer:
    make = OUTER_OPTIMIZERS[name]
    assert make is not None
    return make(learning_rate, momentum)


def moved(optimizer: OuterOptimizer, before: float, averaged: float) -> float:
    models = [{"x": np.array([value], np.float32)} for value in (before, averaged)]
    return float(optimizer.step(*models, {"x"})["x"][0])


def test_steps_by_hand() -> None:
    sgd = made("sgd", 0.5, 0.5)
    assert moved(sgd, 1.0, 3.0) == 2.0  # d = 2, v = 2, 1 + 0.5 x 2
    assert moved(sgd, 2.0, 1.0) == 2.0  # d = -1, v = 1 - 1 = 0
    assert moved(sgd, 2.0, 6.0) == 4.0  # d = 4, v = 4
    nesterov = made("nesterov", 0.5, 0.5)  # with a velocity of its own
    assert moved(nesterov, 1.0, 3.0) == 2.5  # d = 2, v = 2, 1 + 0.5 (2 + 0.5 x 2)
    assert moved(nesterov, 2.5, 5.5) == 5.0  # d = 3, v = 1 + 3 = 4, 2.5 + 0.5 (3 + 0.5 x 4)


PARAMETERS = ("large", "double", "counter", "half", "spin", "scalar", "none")


@given(
    st.sampled_from(["sgd", "nesterov"]),
    st.floats(0.01, 2.0),
    st.floats(0.0, 0.99),
    st.integers(0, 99),
)
def test_dtypes_shapes_buffers_and_arguments_stay(
    name: str, learning_rate: float, momentum: float, seed: int
) -> None:
    optimizer = made(name, learning_rate, momentum)
    for round_ in range(3):
        before, averaged = (mixed_model(seed + round_ + i, 2) for i in (0, 1))
        found = optimizer.step(before, averaged, PARAMETERS)
        assert bits(before) == bits(mixed_model(seed + round_, 2))
        assert bits(averaged) == bits(mixed_model(seed + round_ + 1, 2))
        assert list(found) == list(averaged)
        for key, tensor in found.items():
            assert isinstance(tensor, np.ndarray)
            assert (tensor.dtype, tensor.shape) == (averaged[key].dtype, averaged[key].shape)
        for key in ("small", "mask", "counter"):  # the last is an integer, whoever names it
            assert found[key].tobytes() == averaged[key].tobytes()


def test_update_is_computed_in_float64() -> None:
    # float32 has no number between 2^24 and 2^24 + 2: there -1 - 2^24 is -2^24.
    before, averaged = np.array([2.0**24], np.float32), np.array([-1.0], np.float32)
    found = made("sgd", 2.0).step({"x": before}, {"x": averaged}, {"x"})["x"]
    assert found[0] == -(2.0**24) - 2  # 2^24 - 2 (2^24 + 1)


@pytest.mark.parametrize("name", ["sgd", "nesterov"])
def test_refused_by_name_and_value(name: str) -> None:
    for learning_rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"learning_rate = {learning_rate}"):
            made(name, learning_rate, 0.9)
    for momentum in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=f"momentum = {momentum}"):
            made(name, 0.7, momentum)
