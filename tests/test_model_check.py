"""Which models and optimizer states can be averaged, and what a refusal says."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from flower_blsgd.model_check import ModelShape
from flower_blsgd.wire import ProtocolError

from .in_process_grid import tensors_of, toy_arrays


def changed(**tensors: np.ndarray | None) -> ArrayRecord:
    arrays = toy_arrays(1.0)
    for name, tensor in tensors.items():
        if tensor is None:
            del arrays[name]
        else:
            arrays[name] = Array(tensor)
    return arrays


def test_checked_returns_the_tensors() -> None:
    found = ModelShape(toy_arrays()).checked(toy_arrays(2.0))
    expected = tensors_of(toy_arrays(2.0))
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert np.array_equal(tensor, expected[name])


def test_checked_ignores_the_order_of_the_tensors() -> None:
    backwards = ArrayRecord(dict(reversed(toy_arrays(2.0).items())))
    assert set(ModelShape(toy_arrays()).checked(backwards)) == {"weight", "bias", "counter"}


def test_num_bytes_counts_every_tensor() -> None:
    assert ModelShape(toy_arrays()).num_bytes == 2 * 4 + 8 + 8


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bias": None}, "lacks tensor 'bias'"),
        ({"bias": None, "counter": None}, "lacks tensor 'bias'"),
        ({"mask": np.zeros(2)}, "extra tensor 'mask'"),
        ({"weight": np.zeros((1, 2), np.float32)}, r"'weight' is float32 of shape \(1, 2\)"),
        ({"weight": np.zeros((2,), np.float32)}, r"not float32 of shape \(2, 1\)"),
        ({"weight": np.zeros((2, 1), np.float64)}, "'weight' is float64"),
        ({"counter": np.array(7, np.int32)}, "'counter' is int32"),
        ({"counter": np.array(7.0)}, "'counter' is float64"),
        ({"weight": np.array([[1.0], [np.nan]], np.float32)}, "'weight' is not finite"),
        ({"bias": np.array([np.inf])}, "'bias' is not finite"),
        ({"bias": np.array([-np.inf])}, "'bias' is not finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_checked_refuses_by_name(changes: dict[str, np.ndarray | None], told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        ModelShape(toy_arrays()).checked(changed(**changes))


def test_checked_refuses_data_of_another_shape_than_it_claims() -> None:
    arrays = toy_arrays()
    data = Array(np.zeros(3, np.float32)).data
    arrays["weight"] = Array(dtype="float32", shape=(2, 1), stype="numpy.ndarray", data=data)
    with pytest.raises(ProtocolError, match="weight"):
        ModelShape(toy_arrays()).checked(arrays)


def record_of(**tensors: np.ndarray) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor) for name, tensor in tensors.items()})


def test_checked_passes_integers_and_large_numbers() -> None:
    model = record_of(
        counter=np.array(2**62),
        flag=np.array([True]),
        large=np.array([np.finfo(np.float32).max], np.float32),
    )
    assert ModelShape(model).checked(model)["counter"] == 2**62


def test_checked_looks_into_complex_numbers() -> None:
    model = record_of(spin=np.array([complex(0, np.nan)]))
    with pytest.raises(ProtocolError, match="'spin'"):
        ModelShape(model).checked(model)


def test_checked_knows_no_optimizer_state() -> None:
    model = record_of(a=np.zeros(2))
    with pytest.raises(ProtocolError, match="extra tensor 'exp_avg/a'"):
        ModelShape(model).checked(record_of(**{"a": np.zeros(2), "exp_avg/a": np.zeros(2)}))


# --- what an optimizer keeps


def test_momentum_may_leave_parameters_out_but_adds_none() -> None:
    shape = ModelShape(record_of(a=np.zeros(2), b=np.ones(3)))
    assert list(shape.checked_momentum(record_of(b=np.full(3, 2.0)))) == ["b"]
    with pytest.raises(ProtocolError, match="extra tensor 'c'"):
        shape.checked_momentum(record_of(c=np.zeros(1)))
    with pytest.raises(ProtocolError, match="lacks tensor 'a'"):
        shape.checked(record_of(b=np.ones(3)))


def adamw_state(parameter: str = "weight", **changes: np.ndarray | None) -> ArrayRecord:
    """Return AdamW's state of one parameter of the toy model, with some slots changed."""
    slots: dict[str, np.ndarray | None] = {
        "exp_avg": np.ones((2, 1), np.float32),
        "exp_avg_sq": np.ones((2, 1), np.float32),
        "step": np.array(3.0, np.float32),
    }
    return record_of(
        **{f"{k}/{parameter}": v for k, v in (slots | changes).items() if v is not None}
    )


def test_momentum_of_adamw_has_two_moments_and_a_counter() -> None:
    found = ModelShape(toy_arrays()).checked_momentum(adamw_state())
    assert set(found) == {"exp_avg/weight", "exp_avg_sq/weight", "step/weight"}
    assert (found["step/weight"].shape, found["step/weight"]) == ((), 3.0)


def test_momentum_of_a_parameter_with_a_stroke_in_its_name() -> None:
    shape = ModelShape(record_of(**{"a/b": np.zeros((2, 1), np.float32)}))
    assert len(shape.checked_momentum(adamw_state("a/b"))) == 3
    assert list(shape.checked_momentum(record_of(**{"a/b": np.ones((2, 1), np.float32)})))


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (adamw_state("mask"), "extra tensor 'exp_avg/mask'"),
        (adamw_state(max_exp_avg_sq=np.ones(2)), "extra tensor 'max_exp_avg_sq/weight'"),
        (adamw_state(step=None), "lacks tensor 'step/weight'"),
        (adamw_state(exp_avg=None), "lacks tensor 'exp_avg/weight'"),
        (adamw_state(exp_avg=None, step=None), "lacks tensor 'exp_avg/weight'"),
        (adamw_state(exp_avg=np.ones(2, np.float32)), r"'exp_avg/weight' is float32 of shape \(2,"),
        (adamw_state(exp_avg_sq=np.ones((2, 1))), "'exp_avg_sq/weight' is float64"),
        (adamw_state(step=np.array(3)), "'step/weight' is int64"),
        (adamw_state(step=np.ones(1, np.float32)), r"not float32 of shape \(\)"),
        (adamw_state(step=np.array(np.nan, np.float32)), "'step/weight' is not finite"),
        (
            adamw_state(exp_avg_sq=np.array([[1], [np.inf]], np.float32)),
            "'exp_avg_sq/weight' is not finite",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_momentum_of_adamw_is_refused_by_name(state: ArrayRecord, told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        ModelShape(toy_arrays()).checked_momentum(state)
