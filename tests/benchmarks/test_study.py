"""The study: its estimator, what it runs next, what it keeps, and that its rival is one."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.study import loop, report, runs, stages
from benchmarks.study.arms import ADD_ONS, arm, on_fast_alone
from benchmarks.study.estimator import Curve, Target, interval, speedup
from benchmarks.study.runs import Run, Store, is_due

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


# --- rows


def test_rows_survive_a_torn_line(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append("long", {"key": "a"})
    with (tmp_path / "long.jsonl").open("a") as file:
        file.write('{"key": "b')
    assert store.read("long") == [{"key": "a"}]
    store.append("long", {"key": "c"})
    assert store.read("long") == [{"key": "a"}, {"key": "c"}]


def test_what_failed_or_was_unsteady_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("confirmation", "bare", 0.1, 100.0)
    row = {"key": run.key}
    assert is_due(run, [])
    assert not is_due(run, [row])
    assert not is_due(run, [{**row, "steady": True}])
    for again in ({"error": "no"}, {"steady": False}):
        assert is_due(run, [{**row, **again}] * 2)
        assert not is_due(run, [{**row, **again}] * 3)
    monkeypatch.setattr(runs, "why_not", lambda _: "not known")
    assert not is_due(run, [])


# --- what is run


def screened(made_up: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the rows of a screening whose accuracies are made up; best is rate 0.4."""
    monkeypatch.setattr(stages, "why_not", lambda name: "not there" if "qsr" in name else "")
    rows: list[dict[str, Any]] = []
    while True:
        there = {row["key"] for row in rows}
        due = [r for r in stages.screening({"screening": rows}, stages.FULL) if r.key not in there]
        if not due:
            return rows
        for run in due:
            parts = run.arm.split("+")
            accuracy = 0.5 + sum(made_up.get(part, 0.0) for part in parts)
            accuracy -= 0.01 * abs(math.log2(run.rate / 0.4))
            rows.append({"key": run.key, **asdict(run), "accuracy": accuracy, "commit": "a"})


def test_screening_finds_the_best_and_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = {"bare-48": 0.01, "biased": 0.05, "ema": 0.02, "infobatch": 0.03, "random-subset": 0.02}
    rows = screened({**gains, "qsr": 0.9, "permuted": 0.9, "score": 0.1}, monkeypatch)
    made = stages.choice({"screening": rows}, stages.FULL)
    assert made is not None
    assert (made.base, made.ours, made.same) == (
        "biased",
        "biased+infobatch+ema",
        "fast-only+infobatch+ema",
    )
    assert (made.fast_alone, made.ours_rate, made.rates["weighted"]) == ("bare-48", 0.4, 0.4)
    assert made.ours_at_16 == "fast-only+infobatch+score"
    assert {row["rate"] for row in rows if row["arm"] == "bare"} == {*stages.GRID, 0.8}
    assert not any("qsr" in row["arm"] for row in rows)

    confirmed = stages.confirmation({"screening": rows}, stages.FULL)
    arms = [run.arm for run in confirmed if run.seed == 100]
    assert sorted(set(arms)) == sorted(
        {made.ours, made.ours_at_16, made.same, "bare-48", "ddp-equal", "ddp-proportional"}
    )
    assert len(arms) == 2 + (3 + 1) + (3 + 2) + 3
    assert len([run for run in confirmed if run.seed == 107]) == 2 + 3 + 1
    # an arm that is 10 % sooner at each gap, in made-up accuracies
    done = [
        {
            "key": run.key,
            **asdict(run),
            "training_seconds": run.seconds,
            "accuracy": math.log(run.seconds * (1.1 if arm(run.arm).both else 1.0)) / 10,
        }
        for run in confirmed
    ]
    found = report.compared(done, made.ours, 4.0, "bare-48", 1.0)
    assert found is not None
    assert found[0].factor.mean == pytest.approx(1.1)
    assert found[0].factor.count == 5
    page = report.page({**{stage: [] for stage in stages.STAGES}, "screening": rows}, stages.FULL)
    assert "ours = `biased+infobatch+ema` at rate 0.4" in page


def test_an_arm_is_a_base_and_settings_that_are_added() -> None:
    made = arm("biased-to-slow+infobatch+ema+score")
    assert made.scores
    assert made.settings == {
        "algorithm": "biased-local-sgd",
        "high-loss-to": "slow",
        **ADD_ONS["infobatch"].settings,
        **ADD_ONS["ema"].settings,
    }
    assert on_fast_alone("biased+infobatch+qsr") == "fast-only+infobatch"


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
    commands = [runs._command("loop", {**apart, "rank": rank}) for rank in range(2)]
    found = runs._done(commands, tmp_path, 240.0)
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
