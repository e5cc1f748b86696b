"""The study: its estimator, its stages, its rows, its counted clock, and its rival."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.study import __main__ as study_command
from benchmarks.study import counted, loop, report, runs, stages
from benchmarks.study.arms import FAST_CORE, SHAPES, SLOW_CORE
from benchmarks.study.estimator import Curve, Target, interval, speedup, total
from benchmarks.study.runs import Run, Store, is_due
from benchmarks.study.tasks import Places
from flower_blsgd import train

# --- estimator


@pytest.mark.parametrize(
    ("accuracy", "factor", "marked"),
    [
        (0.65, 1.25, (0, 0)),
        (0.625, 100 / math.sqrt(65 * 80), (0, 0)),  # half way in log time
        (0.5, 100 / 65, (1, 0)),  # understated
        (0.9, 0.5, (0, 1)),  # no further than that
    ],
)
def test_time_to_an_accuracy(accuracy: float, factor: float, marked: tuple[int, int]) -> None:
    found = speedup([Curve((65, 80, 100), (0.6, 0.65, 0.7))], [Target(100, accuracy)])
    assert found.by_seed == pytest.approx([factor])
    assert (found.at_shortest, found.beyond_longest) == marked


def test_what_was_not_reached_follows_the_slope_that_seeds_have_in_common() -> None:
    times = (50.0, 100.0)
    low, high = (tuple(math.log(t) + offset for t in times) for offset in (0.0, 1.0))
    curves = [Curve(times, low), Curve(times, high)]  # slope 1
    targets = [Target(100, math.log(100) + 0.1), Target(100, math.log(50) + 1.0)]
    found = speedup(curves, targets)
    assert found.by_seed == pytest.approx([math.exp(-0.1), 2.0])
    assert found.factor.mean == pytest.approx(math.exp((math.log(2) - 0.1) / 2))


def test_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.low) == pytest.approx((2.0, 2 - 4.302653 / math.sqrt(3)))
    assert math.isnan(interval([1.0]).low)


def test_a_sum_of_two_means_has_the_interval_of_welch() -> None:
    found = total([1, 3], [2, 4])  # variances of the means 1 and 1, so 2 degrees of freedom
    assert (found.mean, found.high - 5) == (5, pytest.approx(4.3027 * math.sqrt(2), rel=1e-4))


# --- rows


def test_rows_survive_a_torn_line(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append("long", {"key": "a"})
    with (tmp_path / "long.jsonl").open("a") as file:
        file.write('{"key": "b')
    assert store.read("long") == [{"key": "a"}]
    store.append("long", {"key": "c"})
    assert store.read("long") == [{"key": "a"}, {"key": "c"}]


def test_failed_runs_are_repeated() -> None:
    run = Run("confirmation", "fast-32", 0.1, 100.0, shape="")
    row = {"key": run.key}
    assert is_due(run, [])
    assert not is_due(run, [row])
    assert is_due(run, [{**row, "error": "no"}] * 2)
    assert not is_due(run, [{**row, "error": "no"}] * 3)


# --- what is run


def taken(stage: str, rows: dict[str, list[Any]], accuracy: Callable[[Run], float]) -> None:
    """Take all rows of a stage, with made-up accuracies."""
    while due := [r for r in stages.STAGES[stage](rows, stages.FULL) if is_due(r, rows[stage])]:
        made_up = {"training_seconds": 1.0, "loss": 1.0, "commit": "a"}
        rows[stage] += [
            {"key": run.key, **asdict(run), **made_up, "accuracy": accuracy(run)} for run in due
        ]


def test_every_arm_gets_the_same_grid_and_the_best_of_it_is_used() -> None:
    better = {"fast-48": 0.01, "per-sample": 0.02}

    def accuracy(run: Run) -> float:
        best_rate = 0.8 if run.arm == "per-sample" else 0.1  # the grid has to grow
        decay = 0.01 if run.decay == "steps" else 0.0
        return 0.5 + better.get(run.arm, 0) + decay - 0.008 * abs(math.log2(run.rate / best_rate))

    rows: dict[str, list[Any]] = {stage: [] for stage in stages.WITH_ROWS}
    assert stages.weights(rows, stages.FULL) == stages.confirmation(rows, stages.FULL) == []
    taken("screening", rows, accuracy)
    counts = Counter((row["arm"], row["shape"]) for row in rows["screening"])
    # Seed 0: 4 rates x 2 decays. Seeds 1 and 2: those within two points, all but (0.4, linear).
    assert counts["fast-16", ""] == counts["ddp", "gap-4"] == counts["load", "gap-2"] == 8 + 7 * 2
    # 5 contenders of 8, then 0.8, and 1.6 for the other side of that, each with both decays.
    assert counts["per-sample", "gap-2"] == 12 + (5 + 2 + 2) * 2
    found = stages.settings_found(rows, stages.FULL)
    assert found["per-sample", "gap-2"] == (0.8, "steps")
    assert found["load", "gap-4"] == (0.1, "steps")
    assert stages.fast_alone(rows, stages.FULL) == ("fast-48", (0.1, "steps"))

    pairs = stages.weights(rows, stages.FULL)
    assert Counter(run.arm for run in pairs) == {"load": 24, "per-sample": 24, "separated": 24}
    assert not {run.seed for run in pairs} & set(stages.SCREENING_SEEDS)
    confirmed = [run for run in stages.confirmation(rows, stages.FULL) if run.seed == 1100]
    assert Counter(run.arm for run in confirmed) == {"fast-48": 1, "per-sample": 6, "ddp": 2}


def test_counted_runs_are_done_two_at_once_and_each_leaves_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(run: Run, places: Places, core: int) -> dict[str, Any]:
        figures = {"training_seconds": 1.0, "accuracy": 0.5, "loss": 1.0, "commit": "a"}
        return {"key": run.key, **asdict(run), **figures, "core": core}

    monkeypatch.setattr(study_command, "row_of", fake)
    study = study_command.Study(Store(tmp_path), Places("unused"), stages.TINY)
    due = study.due("screening")[:6]
    study._two_at_once(due, lambda line: None)
    rows = study.store.read("screening")
    assert {row["key"] for row in rows} == {run.key for run in due}
    assert {row["core"] for row in rows} == {FAST_CORE, SLOW_CORE}


def test_the_report_finds_how_much_sooner_an_arm_is() -> None:
    rows: dict[str, list[Any]] = {stage: [] for stage in stages.WITH_ROWS}
    taken("screening", rows, lambda run: 0.5 - 0.01 * abs(math.log2(run.rate / 0.1)))
    taken("weights", rows, lambda run: {"load": 0.50, "per-sample": 0.52}.get(run.arm, 0.51))
    taken("confirmation", rows, lambda run: 0.0)
    for row in rows["confirmation"]:  # two devices are 1.2 times sooner
        row["training_seconds"] = row["seconds"]
        faster = 1.2 if row["arm"] == "per-sample" else 1.0
        row |= {"accuracy": math.log(faster * row["seconds"]) / 10, "samples": 1}
    found = report.compared(rows["confirmation"], "per-sample", "gap-2", "fast-16", "")
    assert found is not None
    assert (found[0].factor.mean, found[0].factor.count) == (pytest.approx(1.2), 10)
    page = report.page(rows, stages.FULL)
    assert "| gap-4 | `per-sample` | `load` | 12 | 2.00 [2.00, 2.00] |" in page
    assert "| 2 | (a) tuned fast device | 1.20 [1.20, 1.20] |" in page


def test_speed_ups_are_converted_to_the_wall_clock() -> None:
    rows: dict[str, list[Any]] = {stage: [] for stage in stages.WITH_ROWS}
    taken("screening", rows, lambda run: 0.5)
    taken("confirmation", rows, lambda run: 0.0)
    counted = 32 / (0.00023 + 32 * 0.00122)  # samples per second of the plain loop
    for row in rows["confirmation"]:
        faster = 1.2 if row["arm"] == "per-sample" else 1.0
        row |= {"training_seconds": row["seconds"], "samples": 1.4 * counted * row["seconds"]}
        row["accuracy"] = math.log(faster * row["seconds"]) / 10
    measured = {"fast-32": 1000.0, "per-sample": 1260.0, "ddp": 840.0}  # 0.9 and 0.6 of 1.4 times
    rows["throughput"] = [
        {
            **{"key": f"{arm} {block}", "arm": arm, "shape": "gap-2" if arm != "fast-32" else ""},
            **{"block": block, "neighbor": False, "repeat": True, "commit": "a"},
            "samples_per_second": speed,
        }
        for block in range(2)
        for arm, speed in measured.items()
    ]
    ends = "1.08 [1.08, 1.08] | 1.20 [1.20, 1.20]"
    line = f"| 2 | 0.900 | 0.600 | {ends} | 1.80 [1.80, 1.80] |"
    assert line in list(report.wall_lines(rows, stages.FULL))


def test_a_speed_up_that_no_budget_was_short_enough_for_is_a_lower_bound() -> None:
    curves = [Curve((65, 80, 100), (0.6, 0.65, 0.7))] * 2
    assert report.sooner(speedup(curves, [Target(100, 0.5)] * 2)).startswith(">= 1.54 (all 2 seeds")
    assert "1 of 2 extrapolated" in report.sooner(
        speedup(curves, [Target(100, q) for q in (0.65, 0.8)])
    )


# --- an arm on the counted clock


def test_a_round_counts_as_its_slowest_worker() -> None:
    record = SimpleNamespace(
        workers=[
            SimpleNamespace(fast=True, num_examples=128),
            SimpleNamespace(fast=False, num_examples=64),
        ]
    )
    # 4 steps of 0.02 + 32 x 0.01 s; 2 of them at a gap of 2 take as long
    step = 0.02, 0.01
    gap_2, gap_4 = SHAPES["gap-2"], SHAPES["gap-4"]
    assert counted.round_seconds(record, gap_2, 32, step) == pytest.approx(1.36)
    assert counted.round_seconds(record, gap_4, 32, step) == pytest.approx(2.72)


@pytest.mark.processes
def test_a_counted_run_trains_what_the_local_grid_trains(tmp_path: Path) -> None:
    run = {
        **{"algorithm": "weighted-local-sgd", "weights": "per-sample", "task": "digits"},
        **{"model": "cnn", "batch_size": 32, "local_steps_fast": 2, "local_steps_slow": 1},
        **{"decay_epochs": "", "channels_last": True, "threads": 1, "seed": 4},
    }
    workers = "1x cpu:0 fast; 1x cpu:0 slow"
    real = train(**run, epochs=1, workers=workers, out=tmp_path / "run", quiet=True)
    rounds = real.summary["rounds"]
    given = {
        "task": {"task": "digits", "data": "", "model": "cnn"},
        "run": {key.replace("_", "-"): value for key, value in run.items()} | {"epochs": 9},
        **{"shape": "gap-2", "step_seconds": [1.0, 0.0], "seconds": 2.01 * rounds - 1.0},
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = counted.train(given)
    finally:
        torch.set_num_threads(threads)
    assert (found["rounds"], found["samples"]) == (rounds, real.summary["samples"])
    assert found["training_seconds"] == pytest.approx(2.01 * rounds)
    assert found["loss"] == pytest.approx(real.loss, rel=1e-6)


# --- the rival


@pytest.mark.processes
def test_ddp_in_proportion_is_sgd_with_the_whole_batch(tmp_path: Path) -> None:
    together = loop.Settings(
        task={"task": "digits", "data": "", "model": "cnn", "weight-decay": 1e-4},
        seed=3,
        rate=0.05,
        seconds=3.9,
        cores=[0],
        slowdowns=[1.0],
        batches=[48],
        step_seconds=[[0.152, 0.001]],  # 0.2 s
    )
    apart = asdict(together) | {
        "cores": [0, 0],
        "slowdowns": [1.0, 1.0],
        "batches": [32, 0],
        "step_seconds": [[0.04, 0.005], [0.04, 0.01]],  # 16 samples take as long: 0.2 s
        "folder": str(tmp_path),
    }
    commands = [runs.command("loop", {**apart, "rank": rank}) for rank in range(2)]
    found = runs.done(commands, tmp_path, 240.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = loop.train(together)
    finally:
        torch.set_num_threads(threads)
    assert (found["batches"], found["steps"]) == ([32, 16], 20)
    assert found["training_seconds"] == pytest.approx(4.0)
    assert found["samples"] == whole["samples"] == 20 * 48
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert json.dumps(found)
