"""Averages of hosts' averages are those of all workers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.averaging import (
    AnyArray,
    EqualWeighting,
    LoadWeighting,
    NormalizedWeighting,
    moved_by_updates,
    weighted_average,
)
from flower_blsgd.algorithm.nesting import HostRule, average_by_load, nests

from .teams import QUICK

Model = dict[str, AnyArray]


def model(value: float, counter: int = 0) -> Model:
    return {
        "weight": np.full(2, value, np.float32),
        "mean": np.full(1, value, np.float64),
        "counter": np.array(counter, np.int64),
    }


# --- worked by hand


def test_rule_by_load_worked() -> None:
    """Loads 4 and 2 here give (4 x 1 + 2 x 4) / 6 = 2; with a host of 6 at 8: (12 + 48) / 12."""
    here = HostRule("load").average([model(1.0, 3), model(4.0, 5)], [4.0, 2.0], [2, 1])
    assert here["weight"].tolist() == [2.0, 2.0]
    assert here["counter"] == 5
    both = weighted_average([here, model(8.0)], [0.5, 0.5])
    assert both["weight"].tolist() == [5.0, 5.0]
    flat = LoadWeighting().weights([4.0, 2.0, 6.0])
    assert weighted_average([model(1.0), model(4.0), model(8.0)], flat)["weight"][0] == 5.0


def test_rule_equal_counts_workers_that_completed_a_step() -> None:
    """(1 + 4) / 2 = 2.5; the third did nothing. Two workers against one at 7: 4."""
    here = HostRule("equal").average(
        [model(1.0), model(4.0), model(90.0)], [64.0, 2.0, 0.0], [32, 1, 0]
    )
    assert here["weight"].tolist() == [2.5, 2.5]
    assert weighted_average([here, model(7.0)], [2 / 3, 1 / 3])["weight"][0] == 4.0


def test_rule_of_normalised_updates_worked() -> None:
    """Without momentum a is the number of steps; from 10, steps 3, 1 and 2 lead to 4, 12 and 7.

    tau_eff = (3 + 1 + 2) / 3 = 2, so the scales are 2/9, 2/3, 1/3, and the next model is
    10 - 4/3 + 4/3 - 1 = 9. A host of the first two: (4/3 + 12) / (1/3 + 1) = 10, with scale 8/9.
    Its buffers are averaged with equal weights: (4 + 12) / 2.
    """
    rule = HostRule("equal", (0.0, 1.0, 2.0, 3.0), ("weight",))
    here = rule.average([model(4.0), model(12.0)], [6.0, 2.0], [3, 1])
    assert here["weight"] == pytest.approx([10.0, 10.0])
    assert here["mean"].tolist() == [8.0]
    assert list(here) == list(model(0.0))
    moved = moved_by_updates(model(10.0), [here, model(7.0)], [8 / 9, 1 / 3])
    assert moved["weight"] == pytest.approx([9.0, 9.0])


def test_rule_of_one_worker_is_its_model_to_the_bit() -> None:
    alone = {"weight": np.array([0.1, 1e-30, -3.7], np.float32)}
    for rule in (HostRule("load"), HostRule("equal", (0.0, 1.0, 1.9), ("weight",))):
        assert rule.average([alone], [2.0], [2])["weight"].tobytes() == alone["weight"].tobytes()


def test_rule_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="'median' must be one of load, equal"):
        HostRule("median")


def test_rule_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to average"):
        HostRule("load").average([model(1.0)], [0.0], [0])


# --- which weightings nest


class ByRoot:
    """Nothing is said of it."""

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        roots = [load**0.5 for load in completed_loads]
        return [root / sum(roots) for root in roots]


class SaysLoad(ByRoot):
    worker_weight = "load"


class ByRootAfterAll(ByRoot, LoadWeighting):
    """Inherits what is not true of it."""


class OwnLoad:
    worker_weight = "load"

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        return [load / sum(completed_loads) for load in completed_loads]


class OwnScales(NormalizedWeighting):
    def update_scales(
        self, weights: Sequence[float], completed_steps: Sequence[int]
    ) -> list[float]:
        return [weight * weight for weight in weights]


class ScalesWithoutNorm(OwnLoad):
    def update_scales(
        self, weights: Sequence[float], completed_steps: Sequence[int]
    ) -> list[float]:
        return list(weights)


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        (LoadWeighting(), True),
        (EqualWeighting(), True),
        (NormalizedWeighting(0.9), True),
        (NormalizedWeighting(0.5, nesterov=True), True),
        (OwnLoad(), True),
        (ByRoot(), False),
        (SaysLoad(), False),
        (ByRootAfterAll(), False),
        (OwnScales(), False),
        (ScalesWithoutNorm(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nests_is_tried_out(weighting: Any, expected: bool) -> None:
    assert nests(weighting) is expected


# --- any team on any hosts


@st.composite
def teams(draw: Any) -> tuple[list[int], list[float], list[list[int]], int]:
    """Return steps and loads of workers, which worker is on which host, and a seed."""
    steps = draw(st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any))
    sizes = draw(st.lists(st.integers(2, 64), min_size=len(steps), max_size=len(steps)))
    hosts = draw(st.lists(st.integers(0, 3), min_size=len(steps), max_size=len(steps)))
    members = [[i for i, host in enumerate(hosts) if host == h] for h in sorted(set(hosts))]
    loads = [float(s * b) for s, b in zip(steps, sizes, strict=True)]
    return steps, loads, members, draw(st.integers(0, 2**16))


def models_of(count: int, seed: int) -> list[Model]:
    rng = np.random.default_rng(seed)
    return [
        {
            "weight": rng.normal(size=3).astype(np.float32),
            "mean": rng.normal(size=2),
            "counter": np.array(rng.integers(50), np.int64),
        }
        for _ in range(count)
    ]


def of_hosts(
    rule: HostRule, models: list[Model], loads: list[float], steps: list[int], members: Any
) -> tuple[list[Model], list[list[int]]]:
    """Return the average of each host that did something, and who is in it."""
    counted = [[i for i in host if loads[i]] for host in members]
    counted = [host for host in counted if host]
    averages = [
        rule.average([models[i] for i in host], [loads[i] for i in host], [steps[i] for i in host])
        for host in counted
    ]
    return averages, counted


def assert_close(found: Model, expected: Model, names: Sequence[str] = ()) -> None:
    for name in names or expected:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
        assert found[name].dtype == expected[name].dtype


@QUICK
@given(teams(), st.sampled_from([LoadWeighting(), EqualWeighting()]))
def test_average_of_hosts_is_that_of_their_workers(team: Any, weighting: Any) -> None:
    steps, loads, members, seed = team
    models = models_of(len(steps), seed)
    weights = weighting.weights(loads)
    flat = weighted_average(models, weights)
    averages, counted = of_hosts(HostRule(weighting.worker_weight), models, loads, steps, members)
    nested = weighted_average(averages, [sum(weights[i] for i in host) for host in counted])
    assert_close(nested, flat)
    # What the host can say of itself is as much: its load, or how many completed a step.
    totals = [
        sum(loads[i] for i in host) if weighting.worker_weight == "load" else len(host)
        for host in counted
    ]
    by_totals = [total / sum(totals) for total in totals]
    assert by_totals == pytest.approx([sum(weights[i] for i in host) for host in counted])


@QUICK
@given(teams(), st.floats(0, 0.95), st.booleans())
def test_normalised_updates_of_hosts_are_those_of_their_workers(
    team: Any, momentum: float, nesterov: bool
) -> None:
    steps, loads, members, seed = team
    weighting = NormalizedWeighting(momentum, nesterov)
    models, (before,) = models_of(len(steps), seed), models_of(1, seed + 1)
    weights = weighting.weights(loads)
    scales = weighting.update_scales(weights, steps)
    flat = weighted_average(models, weights)
    flat |= moved_by_updates({"weight": before["weight"]}, models, scales)
    norms = tuple(weighting.update_norm(count) for count in range(max(steps) + 1))
    rule = HostRule(weighting.worker_weight, norms, ("weight",))
    averages, counted = of_hosts(rule, models, loads, steps, members)
    nested = weighted_average(averages, [sum(weights[i] for i in host) for host in counted])
    of_host = [sum(scales[i] for i in host) for host in counted]
    nested |= moved_by_updates({"weight": before["weight"]}, averages, of_host)
    # A norm of 30 beside one of 1 stretches what float32 rounded off.
    bound = 1e-5 * (1 + sum(scales))
    assert nested["weight"] == pytest.approx(flat["weight"], abs=bound)
    assert_close(nested, flat, ["mean", "counter"])


@QUICK
@given(teams(), st.integers(0, 2**16))
def test_momentum_by_load_nests_whoever_has_which_tensor(team: Any, mask: int) -> None:
    steps, loads, members, seed = team
    states = models_of(len(steps), seed)
    for place, state in enumerate(states):
        if mask >> place & 1:
            del state["weight"]  # a worker that did not train this parameter
    done = [i for i, load in enumerate(loads) if load]

    def behind(who: Sequence[int]) -> list[dict[str, float]]:
        return [dict.fromkeys(states[i], loads[i]) for i in who]

    flat, load_behind = average_by_load([states[i] for i in done], behind(done))
    hosts = [[i for i in host if loads[i]] for host in members]
    inner = [average_by_load([states[i] for i in host], behind(host)) for host in hosts]
    nested, nested_behind = average_by_load([s for s, _ in inner], [b for _, b in inner])
    assert set(nested) == set(flat)
    assert_close(nested, flat)
    assert nested_behind == pytest.approx(load_behind)


def test_momentum_by_load_worked() -> None:
    """Two of three have "b": (1 x 2 + 3 x 6) / 4 = 5, with a load of 4 behind it."""
    states = [{"a": np.ones(1), "b": np.full(1, 2.0)}, {"a": np.ones(1)}, {"b": np.full(1, 6.0)}]
    average, behind = average_by_load(states, [dict.fromkeys("ab", x) for x in (1.0, 2.0, 3.0)])
    assert average["b"].tolist() == [5.0]
    assert behind == {"a": 3.0, "b": 4.0}
