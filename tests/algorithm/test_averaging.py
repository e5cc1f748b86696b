import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.averaging import (
    EqualWeighting,
    LoadWeighting,
    NormalizedWeighting,
    PerSampleWeighting,
    Weighting,
    average_at_node,
    average_by_load,
    best_speed_up,
    node_weight,
    weighted_average,
)
from flower_blsgd.algorithm.tensor_sum import AnyArray, move
from flower_blsgd.algorithm.validation import checked_weights
from flower_blsgd.errors import UsageError

from .workers import bits, mixed_model

Model = dict[str, AnyArray]

# weights


@pytest.mark.parametrize(
    ("weighting", "loads", "weights"),
    [
        # 2C+8G at (32, 1): 8 * 32 + 2 * 1 = 258 steps
        (LoadWeighting(), [32] * 8 + [1] * 2, [32 / 258] * 8 + [1 / 258] * 2),
        # the second stopped at its deadline after 4 of 32 steps, the third failed: 32 + 4 + 0 + 4
        (LoadWeighting(), [32, 4, 0, 4], [0.8, 0.1, 0.0, 0.1]),
        # two one-step workers out of ten get 20 % of the model
        (EqualWeighting(), [32] * 8 + [1] * 2, [0.1] * 10),
        # over those with at least one step
        (EqualWeighting(), [32, 0, 1, 0], [0.5, 0.0, 0.5, 0.0]),
        (NormalizedWeighting(), [32, 0, 1, 0], [0.5, 0.0, 0.5, 0.0]),
        (PerSampleWeighting(), [32, 4, 0, 4], [0.8, 0.1, 0.0, 0.1]),  # of buffers
    ],
)
def test_weights_worked(weighting: Weighting, loads: list[float], weights: list[float]) -> None:
    assert weighting.weights(loads) == pytest.approx(weights)


@pytest.mark.parametrize("weighting", [LoadWeighting(), EqualWeighting(), NormalizedWeighting()])
def test_weights_of_nobody_and_of_negative_loads_refused(weighting: Weighting) -> None:
    for loads in ([], [0], [0, 0.0, 0]):
        with pytest.raises(ValueError, match="no worker completed"):
            weighting.weights(loads)
    with pytest.raises(ValueError, match="negative"):
        weighting.weights([3, -1])


@dataclass
class _Own(LoadWeighting):
    """Returns what it is given."""

    numbers: Any

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        return self.numbers  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ([0.5, 0.5], "a list of 3 finite numbers"),
        ([1.5, -0.5, 0.0], "a list of 3 finite"),
        ([math.nan, 0.5, 0.5], "a list of 3 finite"),
        ([math.inf, 0.0, 0.0], "a list of 3 finite"),
        (["1", 0, 0], "a list of 3 finite"),
        (1.0, "a list of 3 finite"),
        ([32.0, 8.0, 0.0], "they must add up to 1"),
        ([0.0, 0.0, 1.0], "with 0 where the load is 0"),
    ],
)
def test_weights_of_an_own_weighting_that_cannot_be_used_are_refused(
    numbers: Any, reason: str
) -> None:
    with pytest.raises(UsageError, match=rf"^_Own\.weights returned .*{reason}"):
        checked_weights(_Own(numbers), [32.0, 8.0, 0.0])


def test_weights_of_workers_that_completed_nothing_go_to_the_others() -> None:
    """0.5, 0.25 and 0.25; the third completed nothing: 2/3 and 1/3."""
    own = _Own(np.array([0.5, 0.25, 0.25], np.float32))
    assert checked_weights(own, [32.0, 8.0, 0.0]) == pytest.approx([2 / 3, 1 / 3, 0.0])
    loads = [32.0, 7.0, 5.0]
    assert checked_weights(LoadWeighting(), loads) == LoadWeighting().weights(loads)


# the average


def _average(arrays: Sequence[AnyArray], weights: Sequence[float]) -> AnyArray:
    return weighted_average([{"x": array} for array in arrays], weights)["x"]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_weighted_average_worked(dtype: str) -> None:
    # 0.75 * 1 + 0.25 * 5 = 2; 0.75 * 2 + 0.25 * -10 = -1
    mean = _average([np.array([1, 2], dtype), np.array([5, -10], dtype)], [0.75, 0.25])
    assert mean.tolist() == [2.0, -1.0]
    assert mean.dtype == dtype
    if dtype == "complex64":  # 0.75 (1 + 2i) + 0.25 (5 - 2i) = 2 + i
        assert _average([mean * 0 + 1 + 2j, mean * 0 + 5 - 2j], [0.75, 0.25])[0] == 2 + 1j


@pytest.mark.parametrize(
    ("dtype", "values", "largest"),
    [
        ("uint8", [3, 100, 7], 100),
        ("int64", [2**53, 2**53 + 1], 2**53 + 1),  # which is no float64
        ("int64", [-5, -3], -3),
        ("bool", [False, True, False], True),
    ],
)
def test_weighted_average_of_integers_is_the_maximum(
    dtype: str, values: list[int], largest: int
) -> None:
    weights = EqualWeighting().weights([1] * len(values))
    average = _average([np.array([value, 0], dtype) for value in values], weights)
    assert average.tolist() == [largest, 0]
    assert average.dtype == dtype


def test_weighted_average_weight_zero_counts_in_nothing() -> None:
    good = {"w": np.array([1.0], np.float32), "n": np.array(3)}
    failed = {"w": np.array([math.nan], np.float32), "n": np.array(99)}
    for models, weights in [([good, failed, {}], [1, 0, 0]), ([failed, good], [0, 1])]:
        average = weighted_average(models, weights)
        assert average["w"].tolist() == [1.0]
        assert average["n"].tolist() == 3


@pytest.mark.parametrize("weights", [[], [0.0], [0.0, 0.0]])
def test_weighted_average_of_nobody_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="nothing to average"):
        weighted_average([{"x": np.zeros(1)} for _ in weights], weights)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("count", [1, 3, 10, 700])
def test_weighted_average_of_equal_models_is_that_model_to_the_bit(dtype: str, count: int) -> None:
    info = np.finfo(dtype)
    edges = [0.1, 1 / 3, info.max, info.min, info.tiny, info.smallest_subnormal]
    drawn = np.random.default_rng(0).normal(size=200)
    model = np.concatenate([drawn.astype(dtype), np.array(edges, dtype)])
    loads = np.random.default_rng(count).integers(1, 33, count).tolist()
    for weighting in (LoadWeighting(), EqualWeighting()):
        average = _average([model] * count, weighting.weights(loads))
        assert average.dtype == dtype
        assert average.tobytes() == model.tobytes()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_weighted_average_keeps_its_digits_wherever_the_heavy_model_stands(place: int) -> None:
    """11 / 24 + 0 x 22 / 24 + 0 / 24 = 0.4583333...; the heavy one is first, second or third."""
    values, loads = [np.float32(11.0), np.float32(0.0)], [1.0, 1.0]
    values.insert(place, np.float32(0.0))
    loads.insert(place, 22.0)
    arrays = [np.array([value]) for value in values]
    average = _average(arrays, LoadWeighting().weights(loads))
    assert average[0] == np.float32(11 / 24)


# updates from the global model


def test_move_worked() -> None:
    before = {"x": np.array([1.0, 2.0], np.float32)}
    models = [{"x": np.array([3.0, 2.0], np.float32)}, {"x": np.array([0.0, 6.0], np.float32)}]
    # 1 + 0.5 x 2 + 2 x (-1) = 0;  2 + 0.5 x 0 + 2 x 4 = 10
    moved = move(before, models, [0.5, 2.0])
    assert moved["x"].tolist() == [0.0, 10.0]
    assert moved["x"].dtype == np.float32
    assert before["x"].tolist() == [1.0, 2.0]


# where the result goes


def test_result_is_written_to_out_which_may_have_more_names() -> None:
    *models, before = (mixed_model(seed, 70_000) for seed in range(4))
    for out_of in (
        lambda out: weighted_average(models, [0.5, 0.3, 0.2], out),
        lambda out: weighted_average([models[0], {}], [1.0, 0.0], out),
    ):
        out = {name: np.full_like(tensor, 1) for name, tensor in reversed(before.items())}
        out["another"], out["double"] = np.array(7.0), np.zeros(14)[::2]  # of any memory order
        for tensor in (t for model in (before, *models) for t in model.values()):
            tensor.flags.writeable = False  # as views on a worker's shared memory may be
        found = out_of(out)
        assert list(found) == list(before)
        assert all(found[name] is out[name] for name in found)
        assert bits(found) == bits(out_of(None))
        assert not any(np.shares_memory(out[name], models[0][name]) for name in before)
        assert out["another"] == 7.0


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (np.zeros(3, np.float32), r"'x' has shapes \(2,\) and \(3,\)"),
        (np.zeros(2), "'x' has dtypes float32 and float64"),
    ],
)
def test_average_of_tensors_that_do_not_fit_is_refused(wrong: AnyArray, expected: str) -> None:
    right = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match=expected):
        weighted_average([{"x": right}, {"x": wrong}], [0.5, 0.5])
    with pytest.raises(ValueError, match=expected):
        weighted_average([{"x": right}, {"x": right}], [0.5, 0.5], {"x": wrong})
    with pytest.raises(ValueError, match=expected):
        move({"x": right}, [{"x": wrong}], [0.5])


# FedNova: normalised updates


@pytest.mark.parametrize(
    ("weighting", "weights", "steps", "scales"),
    [
        # With momentum 0.9 from zero, the gradient of a step enters the update once directly and
        # again, 0.9 times weaker, in every later step. Three steps: the first gradient counts
        # 1 + 0.9 + 0.81 = 2.71, the second 1.9, the third 1: a = 5.61. One step: a = 1.
        # tau_eff = (5.61 + 1) / 2 = 3.305. Scales: 3.305 x 0.5 / 5.61 and 3.305 x 0.5 / 1.
        (NormalizedWeighting(0.9), [0.5, 0.5], [3, 1], [0.29456327985739754, 1.6525]),
        # Nesterov adds 0.9 times the buffer after the step to the gradient: 1 + 0.9 x 1 = 1.9 in
        # the first, 1 + 0.9 x 1.9 = 2.71 in the second: a = 4.61 for two steps, 1.9 for one.
        # tau_eff = (4.61 + 1.9) / 2 = 3.255.
        (
            NormalizedWeighting(0.9, nesterov=True),
            [0.5, 0.5],
            [2, 1],
            [3.255 / 2 / 4.61, 3.255 / 2 / 1.9],
        ),
        # without momentum a_i = tau_i; tau_eff = (4 + 2) / 2 for the two that did something
        (NormalizedWeighting(0.0), [0.5, 0.5, 0.0], [4, 2, 0], [0.375, 0.75, 0.0]),
    ],
)
def test_normalized_scales_worked(
    weighting: NormalizedWeighting, weights: list[float], steps: list[int], scales: list[float]
) -> None:
    assert weighting.update_scales(weights, steps) == pytest.approx(scales, rel=1e-12)
    assert weighting.scales_updates
    assert weighting.momentum_buffers == "reset"  # it holds for no other


@pytest.mark.parametrize(
    ("sizes", "steps", "scales"),
    [
        # One fast and one slow worker: both have the fast one's load weight of 32 / 40.
        ((8, 8), (32, 8), [0.8, 0.8]),
        ((8, 8, 8), (16, 8, 4), [16 / 28] * 3),
        # Equal workers: the plain average.
        ((8, 8, 8, 8), (5, 5, 5, 5), [0.25] * 4),
        # One step each: by batch size, as in the gradient of the whole batch.
        ((6, 2), (1, 1), [0.75, 0.25]),
        # 6 x 4, 2 x 8 and 4 x 4 of 56 samples; the first has the largest load: b_i x 4 / 56.
        ((6, 2, 4), (4, 8, 4), [24 / 56, 8 / 56, 16 / 56]),
        # Of equal loads the lowest index has tau_r: b_i x 2 / 16, and b_i x 4 / 16.
        ((4, 2), (2, 4), [8 / 16, 4 / 16]),
        ((2, 4), (4, 2), [8 / 16, 16 / 16]),
        # One failed; another stopped at its deadline after 3 of 32 steps.
        ((8, 8, 8), (32, 0, 3), [32 / 35, 0.0, 32 / 35]),
    ],
)
def test_per_sample_scales_worked(
    sizes: tuple[int, ...], steps: tuple[int, ...], scales: list[float]
) -> None:
    weighting = PerSampleWeighting()
    weights = weighting.weights([size * count for size, count in zip(sizes, steps, strict=True)])
    found = weighting.update_scales(weights, steps)
    assert found == pytest.approx(scales, rel=1e-12)
    longest = weights.index(max(weights))
    assert found[longest] == weights[longest]


@pytest.mark.parametrize(
    ("weighting", "speeds", "sizes", "times"),
    [
        # (1 + g^2)^2 / (1 + g^3) for load weights at gaps of 2, 4 and 16, else 1 + g
        (LoadWeighting(), (2, 1), (32, 32), 1.3889),
        (LoadWeighting(), (4, 1), (32, 32), 1.1115),
        (LoadWeighting(), (16, 1), (32, 32), 1.0076),
        (PerSampleWeighting(), (2, 1), (32, 32), 1.5),
        (PerSampleWeighting(), (16, 1), (64, 8), 1.0625),
        (EqualWeighting(), (4, 1), (32, 32), 1.25),
        # As many steps with batches by speed: load weights are by sample as well.
        (LoadWeighting(), (4, 1), (64, 16), 1.25),
    ],
)
def test_best_speed_up_worked(
    weighting: Weighting, speeds: tuple[float, ...], sizes: tuple[int, ...], times: float
) -> None:
    assert best_speed_up(weighting, speeds, sizes, [True, False]) == pytest.approx(times, abs=1e-4)


# hierarchical averaging: several workers behind one node


@st.composite
def _nodes(draw: st.DrawFn) -> tuple[list[int], list[float], list[list[int]], list[Model]]:
    """Steps, loads and models of workers, and which of those with a step are behind each node."""
    steps = draw(st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any))
    sizes = draw(st.lists(st.integers(2, 64), min_size=len(steps), max_size=len(steps)))
    nodes = draw(st.lists(st.integers(0, 3), min_size=len(steps), max_size=len(steps)))
    members = [[i for i, n in enumerate(nodes) if n == node and steps[i]] for node in range(4)]
    loads = [float(s * b) for s, b in zip(steps, sizes, strict=True)]
    models = _models(len(steps), draw(st.integers(0, 2**16)))
    return steps, loads, [node for node in members if node], models


def _models(count: int, seed: int) -> list[Model]:
    rng = np.random.default_rng(seed)
    return [
        {
            "weight": rng.normal(size=3).astype(np.float32),
            "mean": rng.normal(size=2),
            "counter": np.array(rng.integers(50), np.int64),
        }
        for _ in range(count)
    ]


def _assert_close(found: Model, expected: Model, bound: float = 1e-5) -> None:
    assert set(found) == set(expected)
    for name in expected:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=bound), name
        assert found[name].dtype == expected[name].dtype


@given(
    _nodes(),
    st.one_of(
        st.sampled_from([LoadWeighting(), EqualWeighting(), PerSampleWeighting()]),
        st.builds(NormalizedWeighting, st.floats(0, 0.95), st.booleans()),
    ),
)
def test_average_of_nodes_is_that_of_their_workers(nodes: Any, weighting: Weighting) -> None:
    steps, loads, members, models = nodes
    weights = weighting.weights(loads)
    moving = ("weight",) if weighting.scales_updates else ()
    norms = tuple(weighting.update_norm(count) for count in range(max(steps) + 1))
    rule: Any = node_weight(weighting), norms, moving
    averages = [
        average_at_node(*([x[i] for i in n] for x in (models, loads, steps)), *rule)
        for n in members
    ]
    flat = weighted_average(models, weights)
    nested = weighted_average(averages, [sum(weights[i] for i in node) for node in members])
    bound = 1e-5
    if moving:
        before = {"weight": _models(1, 2**17)[0]["weight"]}
        scales = weighting.update_scales(weights, steps)
        flat |= move(before, models, scales)
        of_nodes = [sum(scales[i] for i in node) for node in members]
        nested |= move(before, averages, of_nodes)
        # A norm of 30 beside one of 1 stretches what float32 rounded off.
        bound *= 1 + sum(scales)
    _assert_close(nested, flat, bound)


def test_momentum_by_load_worked() -> None:
    """Two of three have "b": (1 x 2 + 3 x 6) / 4 = 5."""
    states = [{"a": np.ones(1), "b": np.full(1, 2.0)}, {"a": np.ones(1)}, {"b": np.full(1, 6.0)}]
    loads = [dict.fromkeys(s, n) for s, n in zip(states, (1.0, 2.0, 3.0), strict=True)]
    average = average_by_load(states, loads)
    assert average["a"].tolist() == [1.0]
    assert average["b"].tolist() == [5.0]
