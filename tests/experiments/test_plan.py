"""What to expect of every algorithm before any training, and the tables that show it."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from flower_blsgd.algorithm.catalog import ALGORITHMS
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.experiments.calibration import Speeds, Spread
from flower_blsgd.experiments.plan import (
    Plan,
    plan_runs,
    plan_table,
    slow_device_notes,
    speed_table,
)

NUM_SAMPLES = 50_000


def workers_of(*seconds: float, fast: int = 1) -> list[WorkerSpec]:
    return [
        WorkerSpec("cpu", (core,), tier="fast" if core < fast else "slow", seconds_per_step=each)
        for core, each in enumerate(seconds)
    ]


EIGHT_AND_TWO = workers_of(*[0.01] * 8, *[0.22] * 2, fast=8)
"""The paper's 2C+8G, with slow devices that are 22 times slower."""


def settings(**changes: Any) -> RunConfig:
    return RunConfig(**{"batch_size": 32, "local_steps_slow": "auto", **changes})


def planned(
    *algorithms: str, workers: Sequence[WorkerSpec] = EIGHT_AND_TWO, **changes: Any
) -> Plan:
    return plan_runs(settings(**changes), workers, NUM_SAMPLES, algorithms or tuple(ALGORITHMS))


# --- predictions; test_cost_model works out those of every algorithm


def test_workers_are_ranked_and_keep_their_number_in_the_specification() -> None:
    plan = planned("fast-only-local-sgd", workers=EIGHT_AND_TWO[::-1])
    assert [worker.speed_ratio for worker in plan.workers] == pytest.approx([1] * 8 + [1 / 22] * 2)
    assert [w.profile.partition_id for w in plan.workers] == [2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    unnamed = [WorkerSpec("cpu", seconds_per_step=seconds) for seconds in (0.01, 0.0125, 0.02)]
    for threshold, tiers in ((0.7, [True, True, False]), (0.4, [True, True, True])):
        plan = planned("sync-sgd", workers=unnamed, fast_threshold=threshold)
        assert [worker.fast for worker in plan.workers] == tiers


# --- plan's table


def lines_of(renderable: RenderableType, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in lines)
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
    return lines


def plan_cells(lines: Sequence[str], algorithm: str) -> list[str]:
    """Return the nine cells of an algorithm's row; that of the steps may hold spaces."""
    first, *_ = textwrap.wrap(algorithm, 20)  # a longer one takes two lines
    (line,) = [line for line in lines if line.split()[:1] == [first]]
    name, rest = line.split(maxsplit=1)
    return [name, *rest.rsplit(maxsplit=7)]


def test_plan_row_hand_worked() -> None:
    """1 x 32 + 1 x 8 steps of 16: 640 samples in 0.32 s; 78.125 rounds of them are an epoch."""
    plan = planned("biased-local-sgd", workers=workers_of(0.01, 0.04), batch_size=16)
    lines = lines_of(plan_table(replace(plan, source="thin air")))
    assert lines[0] == "expected, from thin air"
    assert plan_cells(lines, "biased-local-sgd") == [
        *("biased-local-sgd", "32, 8", "20.0%", "78.1", "0.32", "25", "0%", "0%", "2,000"),
    ]
    shrunk = planned("biased-local-sgd", workers=workers_of(0.01, 1.0), batch_size=16)
    steps = plan_cells(lines_of(plan_table(shrunk)), "biased-local-sgd")[1]
    assert steps == "32 of 16, 1 of 5"


@pytest.mark.parametrize("width", [80, 100])
def test_plan_of_every_algorithm_fits_and_keeps_every_name_and_number(width: int) -> None:
    lines = lines_of(plan_table(planned(batch_size=16)), width)
    for name in ALGORITHMS:
        assert len(plan_cells(lines, name)) == 9, name
    assert plan_cells(lines, "biased-local-sgd")[2] == "0.8%"
    assert plan_cells(lines, "fast-only-local-sgd")[1:3] == ["8x 32", "-"]
    assert plan_cells(lines, "sync-sgd") == [
        *("sync-sgd", "10x 1", "20.0%", "312.5", "0.22", "68.8", "95%", "0%", "727"),
    ]


def test_refused_algorithms_say_why_and_the_others_are_planned() -> None:
    plan = planned("biased-local-sgd", "sync-sgd", workers=workers_of(0.01, 0.01, fast=2))
    lines = lines_of(plan_table(plan))
    assert plan_cells(lines, "biased-local-sgd") == ["biased-local-sgd", "refused", *["-"] * 7]
    assert len(plan_cells(lines, "sync-sgd")) == 9
    assert any(line.startswith("biased-local-sgd: workers: no slow worker") for line in lines)
    nothing = lines_of(plan_table(plan_runs(settings(), EIGHT_AND_TWO, 20, ["sync-sgd"])))
    assert any("batch-size = 32" in line for line in nothing)


def test_slow_devices_that_do_not_help_are_named_plainly() -> None:
    """Each adds 1/177 to the speed of the others, and load weights count that as nothing."""
    plan = plan_runs(settings(), EIGHT_AND_TWO, NUM_SAMPLES, ["biased-local-sgd"], num_test=10_000)
    gains = "(expected speed-up: training 1.00, role=evaluate 1.01)"
    assert slow_device_notes(plan) == [
        "largest speed-up over the fast devices alone that the weights allow, each at its best "
        "learning rate: 1.00 (biased-local-sgd)",
        f"slow-8 (cpu:8): best left out {gains}",
        f"slow-9 (cpu:9): best left out {gains}",
    ]
    only_fast = planned("sync-sgd", workers=workers_of(0.01, 0.01, fast=2))
    assert slow_device_notes(only_fast) == []
    assert slow_device_notes(planned("sync-sgd", workers=workers_of(0.01, 0.01, fast=0))) == []


def test_ceiling_of_the_weights_is_printed_for_each_that_is_planned() -> None:
    """One fast worker and one half as fast."""
    pair = workers_of(0.01, 0.02, fast=1)
    load = slow_device_notes(planned("biased-local-sgd", "unbiased-local-sgd", workers=pair))
    assert load[0].endswith(": 1.39 (biased-local-sgd); 1.50 (unbiased-local-sgd)")
    config = replace(settings(), weights="per-sample")
    (line, *_) = slow_device_notes(plan_runs(config, pair, 50_000, ["biased-local-sgd"]))
    assert line.endswith(": 1.50 (biased-local-sgd)")


@pytest.mark.parametrize(
    ("gap", "weights", "use", "training", "evaluating"),
    [
        # 10,000 test samples, each a third of a step's: 1/15 of the time of 50,000 samples.
        (2, "load", "used for training", 1.14, 1.07),  # 0.35 of 25/18 - 1
        (2.5, "per-sample", "used for training", 1.14, 1.07),  # 0.35 of 0.4
        (4, "per-sample", "used for training", 1.09, 1.07),
        (4, "load", "used for role=evaluate", 1.04, 1.07),  # 0.35 of (17/16)^2 / (65/64) - 1
        (16, "per-sample", "used for role=evaluate", 1.02, 1.06),  # a sixteenth: not all of it
        (200, "per-sample", "left out", 1.00, 1.00),
    ],
)
@pytest.mark.parametrize("role", ["train", "evaluate"])
def test_role_that_a_slow_device_is_worth(
    gap: float, weights: str, use: str, training: float, evaluating: float, role: Any
) -> None:
    fast, slow = workers_of(0.01, 0.01 * gap)
    workers, config = [fast, replace(slow, role=role)], settings(weights=weights)
    plan = plan_runs(config, workers, 50_000, ["weighted-local-sgd"], num_test=10_000)
    gains = f"training {training:.2f}, role=evaluate {evaluating:.2f}"
    label = "slow-1 (cpu:1)" if role == "train" else "evaluate-1 (cpu:1)"
    assert slow_device_notes(plan)[-1] == f"{label}: best {use} (expected speed-up: {gains})"


def test_without_a_known_test_set_the_worth_of_evaluating_is_not_said() -> None:
    seldom = replace(settings(), evaluate_every_epochs=20)  # a 300th of the time
    pair = workers_of(0.01, 0.16)
    for config, num_test, role in ((settings(), 0, ""), (seldom, 10_000, ", role=evaluate 1.00")):
        plan = plan_runs(config, pair, 50_000, ["weighted-local-sgd"], num_test=num_test)
        assert slow_device_notes(plan)[-1].endswith(
            f"best left out (expected speed-up: training 1.00{role})"
        )


def test_batches_of_their_own_are_planned_and_dlb_refuses_them() -> None:
    """3,200 and 400 samples a second."""
    fast, slow = workers_of(0.01, 0.02)
    plan = planned("biased-local-sgd", "dlb", workers=[fast, replace(slow, batch_size=8)])
    lines = lines_of(plan_table(plan))
    assert plan_cells(lines, "biased-local-sgd")[1] == "32 of 32, 16 of 8"
    assert plan_cells(lines, "dlb")[1] == "refused"
    assert any("dlb: worker slow-1 (cpu:1) has batch=8, but this algorithm" in x for x in lines)


# --- calibrate's table


@pytest.mark.parametrize(("clock", "gamma"), [("wall", "0.4"), ("device", "0.25")])
def test_speeds_hand_worked(clock: Any, gamma: str) -> None:
    """The first worker is the slow one, and the table begins with the fastest."""
    alone = [Spread(0.04, 0.02, 0.08), Spread(0.01, 0.005, 0.02)]
    loaded = [Spread(0.05, 0.025, 0.1), Spread(0.02, 0.01, 0.04)]
    speeds = Speeds(alone, loaded, Spread(0.001, 0.0005, 0.002))
    slow, fast = workers_of(0, 0, fast=0)
    workers = speeds.given_to([slow, replace(fast, tier="fast")], clock)
    lines = lines_of(speed_table(speeds, workers, RunConfig(clock=clock)))
    assert [line.split() for line in lines if "(cpu:" in line] == [
        ["fast-0", "(cpu:1)", "10", "(5", "to", "20)", "20", "(10", "to", "40)", "1"],
        f"slow-1 (cpu:0) 40 (20 to 80) 50 (25 to 100) {gamma}".split(),
    ]
    assert any(f"gamma ({clock} clock)" in line for line in lines)
    assert lines[-1] == "overhead of a round: 1 (0.5 to 2) ms"
