import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.averaging import (
    EqualWeighting,
    LoadWeighting,
    NormalizedWeighting,
    moved_by_updates,
    weighted_average,
)

from .teams import QUICK

_loads = st.lists(
    st.one_of(st.just(0.0), st.integers(1, 4096).map(float), st.floats(1e-3, 1e6)),
    min_size=1,
    max_size=12,
).filter(any)

_big = 3 * (1 << 16) + 5  # more than one cache chunk, and no multiple of it


def _average(arrays: list[np.ndarray], weights: list[float]) -> np.ndarray:
    return weighted_average([{"x": array} for array in arrays], weights)["x"]


def test_load_weighting_paper_setting() -> None:
    # 2C+8G at (32, 1): 8 * 32 + 2 * 1 = 258 steps
    weights = LoadWeighting().weights([32] * 8 + [1] * 2)
    assert weights == pytest.approx([32 / 258] * 8 + [1 / 258] * 2)


def test_load_weighting_counts_what_was_completed() -> None:
    # the second stopped at its deadline after 4 of 32 steps, the third failed: 32 + 4 + 0 + 4
    assert LoadWeighting().weights([32, 4, 0, 4]) == pytest.approx([0.8, 0.1, 0.0, 0.1])


def test_equal_weighting_paper_setting() -> None:
    # two one-step workers out of ten get 20 % of the model
    weights = EqualWeighting().weights([32] * 8 + [1] * 2)
    assert sum(weights[8:]) == pytest.approx(0.2)
    assert len(set(weights)) == 1


def test_equal_weighting_is_over_those_with_at_least_one_step() -> None:
    assert EqualWeighting().weights([32, 0, 1, 0]) == pytest.approx([0.5, 0.0, 0.5, 0.0])


@QUICK
@given(_loads)
def test_load_weighting_adds_up_and_is_proportional(loads: list[float]) -> None:
    weights = LoadWeighting().weights(loads)
    assert math.fsum(weights) == pytest.approx(1, abs=1e-12)
    for load, weight in zip(loads, weights, strict=True):
        assert (weight == 0) == (load == 0)
        assert weight == pytest.approx(load / math.fsum(loads))


@QUICK
@given(_loads)
def test_equal_weighting_adds_up_and_is_equal(loads: list[float]) -> None:
    weights = EqualWeighting().weights(loads)
    assert math.fsum(weights) == pytest.approx(1, abs=1e-12)
    counted = sum(load > 0 for load in loads)
    assert weights == [1 / counted if load > 0 else 0 for load in loads]


@pytest.mark.parametrize("weighting", [LoadWeighting(), EqualWeighting()])
@pytest.mark.parametrize("loads", [[], [0], [0, 0.0, 0]])
def test_weighting_fails_loudly_if_nobody_succeeded(
    weighting: LoadWeighting | EqualWeighting, loads: list[float]
) -> None:
    with pytest.raises(ValueError, match="nobody"):
        weighting.weights(loads)


@pytest.mark.parametrize("weighting", [LoadWeighting(), EqualWeighting()])
def test_weighting_negative_load_refused(weighting: LoadWeighting | EqualWeighting) -> None:
    with pytest.raises(ValueError, match="negative"):
        weighting.weights([3, -1])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_weighted_average_worked(dtype: str) -> None:
    # 0.75 * 1 + 0.25 * 5 = 2; 0.75 * 2 + 0.25 * -10 = -1
    mean = _average([np.array([1, 2], dtype), np.array([5, -10], dtype)], [0.75, 0.25])
    assert mean.tolist() == [2.0, -1.0]
    assert mean.dtype == dtype


def test_weighted_average_of_a_model_with_batchnorm() -> None:
    def model(weight: float, mean: float, var: float, batches: int) -> dict[str, np.ndarray]:
        return {
            "conv.weight": np.full((2, 3), weight, np.float32),
            "bn.running_mean": np.array([mean], np.float32),
            "bn.running_var": np.array([var], np.float32),
            "bn.num_batches_tracked": np.array(batches, np.int64),
        }

    average = weighted_average([model(1, 0, 1, 32), model(3, 4, 9, 40)], [0.75, 0.25])
    # 0.75 * 1 + 0.25 * 3 = 1.5; 0.25 * 4 = 1; 0.75 * 1 + 0.25 * 9 = 3; max(32, 40) = 40
    assert list(average) == list(model(0, 0, 0, 0))
    assert (average["conv.weight"] == 1.5).all()
    assert average["conv.weight"].shape == (2, 3)
    assert average["bn.running_mean"].tolist() == [1.0]
    assert average["bn.running_var"].tolist() == [3.0]
    assert average["bn.num_batches_tracked"].tolist() == 40
    assert average["bn.num_batches_tracked"].shape == ()
    assert average["bn.num_batches_tracked"].dtype == np.int64


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", "uint64"])
def test_weighted_average_integers_take_the_maximum_and_stay_integer(dtype: str) -> None:
    models = [np.array([3, 100, 0], dtype), np.array([7, 2, 0], dtype), np.array([5, 5, 0], dtype)]
    largest = _average(models, [0.2, 0.3, 0.5])
    assert largest.tolist() == [7, 100, 0]
    assert largest.dtype == dtype


def test_weighted_average_large_integers_are_exact() -> None:
    # 2^53 + 1 is no float64
    largest = _average([np.array(2**53), np.array(2**53 + 1)], [0.5, 0.5])
    assert largest.tolist() == 2**53 + 1


def test_weighted_average_negative_integers() -> None:
    assert _average([np.array([-5]), np.array([-3])], [0.5, 0.5]).tolist() == [-3]


def test_weighted_average_booleans_stay_boolean() -> None:
    models = [np.array([True, False, False]), np.array([False, False, True])]
    largest = _average(models, [0.9, 0.1])
    assert largest.tolist() == [True, False, True]
    assert largest.dtype == np.bool_


def test_weighted_average_weight_zero_counts_in_nothing() -> None:
    good = {"w": np.array([1.0], np.float32), "n": np.array(3)}
    failed = {"w": np.array([math.nan], np.float32), "n": np.array(99)}
    for models, weights in [([good, failed], [1.0, 0.0]), ([failed, good], [0.0, 1.0])]:
        average = weighted_average(models, weights)
        assert average["w"].tolist() == [1.0]
        assert average["n"].tolist() == 3


@pytest.mark.parametrize("weights", [[], [0.0], [0.0, 0.0]])
def test_weighted_average_of_nobody_refused(weights: list[float]) -> None:
    models = [{"x": np.zeros(1)} for _ in weights]
    with pytest.raises(ValueError, match="nothing to average"):
        weighted_average(models, weights)


def test_weighted_average_needs_one_weight_per_model() -> None:
    with pytest.raises(ValueError, match="zip"):
        weighted_average([{"x": np.zeros(1)}] * 2, [1.0])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("count", [1, 3, 7, 10, 700])
def test_weighted_average_of_equal_models_is_that_model_to_the_bit(dtype: str, count: int) -> None:
    info = np.finfo(dtype)
    drawn = np.random.default_rng(0).normal(size=200).astype(dtype)
    model = np.concatenate(
        [
            drawn,
            np.array([0.1, 1 / 3, info.max, info.min, info.tiny, info.smallest_subnormal], dtype),
        ]
    )
    loads = np.random.default_rng(count).integers(1, 33, count).tolist()
    for weighting in (LoadWeighting(), EqualWeighting()):
        average = _average([model] * count, weighting.weights(loads))
        assert average.dtype == dtype
        assert average.tobytes() == model.tobytes()


def test_weighted_average_of_equal_float64_models_is_that_model_to_the_bit() -> None:
    model = np.array([0.1, 0.3])
    assert _average([model] * 10, EqualWeighting().weights([1] * 10)).tolist() == model.tolist()


def test_weighted_average_of_equal_float64_models_to_an_ulp() -> None:
    model = np.random.default_rng(0).normal(size=100)
    average = _average([model] * 10, EqualWeighting().weights([1] * 10))
    assert average.dtype == np.float64
    np.testing.assert_array_max_ulp(average, model, 4)


@QUICK
@given(st.data(), st.sampled_from(["float16", "float32", "float64"]))
def test_weighted_average_is_the_sum_within_rounding(data: st.DataObject, dtype: str) -> None:
    values = st.lists(st.floats(-1000, 1000, width=16), min_size=4, max_size=4)
    models = data.draw(st.lists(values, min_size=1, max_size=5))
    size = len(models)
    loads = data.draw(st.lists(st.integers(0, 64), min_size=size, max_size=size).filter(any))
    weights = LoadWeighting().weights(loads)
    average = _average([np.array(model, dtype).reshape(2, 2) for model in models], weights)
    assert average.shape == (2, 2)
    assert average.dtype == dtype
    for place, got in enumerate(average.reshape(-1).tolist()):
        terms = [w * model[place] for w, model in zip(weights, models, strict=True)]
        exact = math.fsum(terms)
        # half an ulp of the result's dtype, and what float32 sums may lose
        slack = float(np.spacing(np.array(abs(exact), dtype))) * 0.51
        slack += 1e-6 * sum(map(abs, terms)) if dtype != "float64" else 1e-12
        assert abs(got - exact) <= slack


def test_weighted_average_of_large_tensors_is_right_everywhere() -> None:
    first = np.arange(_big, dtype=np.float32)
    second = np.flip(first)
    average = _average([first, second], [0.25, 0.75])
    expected = 0.25 * first.astype(np.float64) + 0.75 * second.astype(np.float64)
    np.testing.assert_array_equal(average, expected.astype(np.float32))


def test_weighted_average_of_tensors_in_another_memory_order() -> None:
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    column_major = np.asfortranarray(plain)
    strided = np.repeat(plain, 2, axis=1)[:, ::2]
    np.testing.assert_array_equal(
        _average([plain, column_major, strided], [0.5, 0.25, 0.25]), plain
    )


def test_weighted_average_of_scalars_and_empty_tensors_keeps_the_shape() -> None:
    assert _average([np.array(1.0, np.float32)] * 2, [0.5, 0.5]).shape == ()
    assert _average([np.empty((0, 3), np.float16)] * 2, [0.5, 0.5]).shape == (0, 3)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_weighted_average_leaves_the_models_alone(dtype: str) -> None:
    models = [np.array([1, 2, 3], dtype), np.array([3, 2, 1], dtype)]
    for model in models:
        model.flags.writeable = False  # the views on a worker's shared memory may be
    average = _average(models, [0.5, 0.5])
    assert models[0].tolist() == [1, 2, 3]
    assert models[1].tolist() == [3, 2, 1]
    assert not any(np.shares_memory(average, model) for model in models)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_weighted_average_of_one_model_is_a_copy(dtype: str) -> None:
    """Its buffer is used again in the next round."""
    model = np.array([1, 2, 3], dtype)
    average = _average([model], [1.0])
    assert average.tolist() == [1, 2, 3]
    assert not np.shares_memory(average, model)


# --- where the result goes


def _several(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "large": rng.normal(size=(400, 500)).astype(np.float32),
        "small": rng.normal(size=(3, 5)).astype(np.float32),
        "half": rng.normal(size=7).astype(np.float16),
        "double": rng.normal(size=7),
        "spin": (rng.normal(size=7) + 1j * rng.normal(size=7)).astype(np.complex64),
        "scalar": np.array(rng.normal(), np.float32),
        "none": np.empty((0, 2), np.float32),
        "counter": np.array(rng.integers(100)),
        "mask": rng.integers(0, 2, 4).astype(np.bool_),
    }


def _bits(model: dict[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(t.dtype), t.shape, t.tobytes()) for name, t in model.items()}


def test_weighted_average_is_written_to_out() -> None:
    models = [_several(seed) for seed in range(3)]
    out = {name: np.full_like(tensor, 1) for name, tensor in reversed(models[0].items())}
    found = weighted_average(models, [0.5, 0.3, 0.2], out)
    assert list(found) == list(models[0])
    assert all(found[name] is out[name] for name in out)
    assert _bits(found) == _bits(weighted_average(models, [0.5, 0.3, 0.2]))


def test_moved_by_updates_is_written_to_out_which_may_have_more_names() -> None:
    before, *models = (_several(seed) for seed in range(3))
    out = {"another": np.array(7.0)} | {name: np.empty_like(t) for name, t in before.items()}
    found = moved_by_updates(before, models, [0.5, 2.0], out)
    assert list(found) == list(before)
    assert all(found[name] is out[name] for name in found)
    assert _bits(found) == _bits(moved_by_updates(before, models, [0.5, 2.0]))
    assert out["another"] == 7.0


def test_average_is_written_to_out_in_another_memory_order() -> None:
    models = [_several(seed) for seed in range(2)]
    expected = weighted_average(models, [0.75, 0.25])
    out = {
        name: np.asfortranarray(empty) if (empty := np.zeros_like(tensor)).ndim == 2 else empty
        for name, tensor in expected.items()
    }
    out["double"] = np.zeros(14)[::2]
    out["counter"], out["mask"] = np.array(0), np.zeros(8, np.bool_)[::2]
    weighted_average(models, [0.75, 0.25], out)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(out[name], tensor)


def test_average_in_out_of_one_model_is_a_copy() -> None:
    model = _several(0)
    out = {name: np.zeros_like(tensor) for name, tensor in model.items()}
    assert _bits(weighted_average([model, {}], [1.0, 0.0], out)) == _bits(model)
    assert not any(np.shares_memory(out[name], model[name]) for name in model)


def test_average_into_what_is_no_array_is_refused() -> None:
    """It would be lost: a numpy scalar can be read like an array."""
    model = {"x": np.zeros((), np.float32)}
    with pytest.raises(TypeError, match="'x' is a float32"):
        weighted_average([model] * 2, [0.5, 0.5], {"x": np.float32(0)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (np.zeros(3, np.float32), r"'x' has shapes \(2,\) and \(3,\)"),
        (np.zeros(2), "'x' has dtypes float32 and float64"),
    ],
)
def test_average_of_tensors_that_do_not_fit_is_refused(wrong: np.ndarray, told: str) -> None:
    right = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match=told):
        weighted_average([{"x": right}, {"x": wrong}], [0.5, 0.5])
    with pytest.raises(ValueError, match=told):
        weighted_average([{"x": right}, {"x": right}], [0.5, 0.5], {"x": wrong})
    with pytest.raises(ValueError, match=told):
        moved_by_updates({"x": right}, [{"x": wrong}], [0.5])


def test_weighted_average_of_complex_numbers() -> None:
    # 0.75 (1 + 2i) + 0.25 (5 - 2i) = 2 + i
    mean = _average(
        [np.array([1 + 2j], np.complex64), np.array([5 - 2j], np.complex64)], [0.75, 0.25]
    )
    assert mean.tolist() == [2 + 1j]
    assert mean.dtype == np.complex64


# FedNova: normalised updates

_NOVA = NormalizedWeighting(0.9)


def test_normalized_weighting_worked() -> None:
    # With momentum 0.9 from zero, the gradient of a step enters the update once directly and
    # again, 0.9 times weaker, in every later step. Three steps: the first gradient counts
    # 1 + 0.9 + 0.81 = 2.71, the second 1.9, the third 1: a = 5.61. One step: a = 1.
    # tau_eff = (5.61 + 1) / 2 = 3.305. Scales: 3.305 x 0.5 / 5.61 and 3.305 x 0.5 / 1.
    scales = _NOVA.update_scales([0.5, 0.5], [3, 1])
    assert scales == pytest.approx([0.29456327985739754, 1.6525], rel=1e-12)


def test_normalized_weighting_nesterov_worked() -> None:
    # Nesterov adds 0.9 times the buffer after the step to the gradient: 1 + 0.9 x 1 = 1.9 in the
    # first, 1 + 0.9 x 1.9 = 2.71 in the second: a = 4.61 for two steps, 1.9 for one.
    # tau_eff = (4.61 + 1.9) / 2 = 3.255.
    scales = NormalizedWeighting(0.9, nesterov=True).update_scales([0.5, 0.5], [2, 1])
    assert scales == pytest.approx([3.255 / 2 / 4.61, 3.255 / 2 / 1.9], rel=1e-12)


def test_normalized_weighting_without_momentum_counts_steps() -> None:
    # a_i = tau_i; tau_eff = (4 + 2 + 0 + 0) / 2 for the two that did something
    weighting = NormalizedWeighting(0.0)
    weights = weighting.weights([8.0, 4.0, 0.0])
    assert weights == [0.5, 0.5, 0.0]
    assert weighting.update_scales(weights, [4, 2, 0]) == pytest.approx([0.375, 0.75, 0.0])


@QUICK
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), st.floats(0, 0.99))
def test_normalized_weighting_equal_gradients_move_by_the_mean_update(
    steps: list[int], momentum: float
) -> None:
    """If everybody's gradient is 1, x_i - x = -lr a_i, and the mean of these is applied."""
    weighting = NormalizedWeighting(momentum)
    weights = weighting.weights([float(s) for s in steps])
    scales = weighting.update_scales(weights, steps)
    updates = [sum((1 - momentum ** (s - j)) / (1 - momentum) for j in range(s)) for s in steps]
    moved = sum(s * u for s, u in zip(scales, updates, strict=True))
    assert moved == pytest.approx(sum(w * u for w, u in zip(weights, updates, strict=True)))
    for done, scale in zip(steps, scales, strict=True):
        assert (scale == 0) == (done == 0)
    if len({s for s in steps if s}) == 1:  # equal steps: the plain mean of the models
        assert scales == pytest.approx(weights)


def test_normalized_weighting_holds_with_momentum_reset_only() -> None:
    assert _NOVA.momentum_buffers == "reset"


def test_moved_by_updates_worked() -> None:
    before = {"x": np.array([1.0, 2.0], np.float32)}
    models = [{"x": np.array([3.0, 2.0], np.float32)}, {"x": np.array([0.0, 6.0], np.float32)}]
    # 1 + 0.5 x 2 + 2 x (-1) = 0;  2 + 0.5 x 0 + 2 x 4 = 10
    moved = moved_by_updates(before, models, [0.5, 2.0])
    assert moved["x"].tolist() == [0.0, 10.0]
    assert moved["x"].dtype == np.float32
    assert before["x"].tolist() == [1.0, 2.0]


def test_moved_by_updates_leaves_out_a_scale_of_0_and_names_not_asked_for() -> None:
    before = {"x": np.ones(2)}
    failed: dict[str, np.ndarray] = {}  # a worker whose order failed has no tensors
    moved = moved_by_updates(before, [failed, {"x": np.full(2, 3.0), "y": np.ones(1)}], [0.0, 0.5])
    assert set(moved) == {"x"}
    assert moved["x"].tolist() == [2.0, 2.0]


@QUICK
@given(_loads, st.integers(0, 99))
def test_moved_by_updates_with_weights_is_the_weighted_average(
    loads: list[float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    models = [{"x": rng.normal(size=5).astype(np.float32)} for _ in loads]
    weights = LoadWeighting().weights(loads)
    before = {"x": rng.normal(size=5).astype(np.float32)}
    moved = moved_by_updates(before, models, weights)["x"]
    assert moved == pytest.approx(weighted_average(models, weights)["x"], abs=1e-5)
