"""The study: its estimator, its search, its rows, its report, and its rivals."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.study import loop, report, runs, stages
from benchmarks.study.arms import Setting, neighbors, search
from benchmarks.study.estimator import interval, speedup
from benchmarks.study.runs import Run, Store, is_due, on_one_machine
from benchmarks.study.tasks import Transformer, adapted
from flower_blsgd import Task

# --- estimator


def test_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.low) == pytest.approx((2.0, 2 - 4.302653 / math.sqrt(3)))
    assert math.isnan(interval([1.0]).low)


@pytest.mark.parametrize(
    ("value", "factor", "extrapolated"),
    [
        (0.65, 1.5, 0),  # as 150 s
        (0.575, math.sqrt(100 * 150) / 100, 0),  # half way in log time
        (0.35, 1 / 1.5, 1),  # as far below 100 s as 150 s are above it
        (0.8, 1.5**2, 1),
    ],
)
def test_times_sooner_than_the_fast_device_alone(
    value: float, factor: float, extrapolated: int
) -> None:
    budgets = {100.0: {7: 0.5}, 150.0: {7: 0.65}}
    found = speedup(budgets, ({7: value}, {7: 100.0}))
    assert found.by_seed == pytest.approx([factor])
    assert found.extrapolated == extrapolated


def test_each_seed_has_a_constant_and_a_rival_is_measured_with_the_same_curve() -> None:
    # Means 0.5 and 0.7: slope 0.2 per doubling. Seed 1 is 0.1 above the mean, seed 2 below.
    budgets = {50.0: {1: 0.61, 2: 0.39}, 100.0: {1: 0.79, 2: 0.61}}
    arm = {1: 0.80, 2: 0.60, 3: 0.9}, {1: 50.0, 2: 50.0, 3: 50.0}
    assert speedup(budgets, arm).by_seed == pytest.approx([2.0, 2.0])
    slower = {1: 0.80, 2: 0.60}, {1: 100.0, 2: 100.0}
    found = speedup(budgets, arm, slower)
    assert found.by_seed == pytest.approx([2.0, 2.0])
    worse = {1: 0.70, 2: 0.50}, {1: 50.0, 2: 50.0}  # half a doubling
    assert speedup(budgets, arm, worse).by_seed == pytest.approx([math.sqrt(2)] * 2)


def test_the_interval_includes_how_well_the_curve_is_known() -> None:
    budgets = {50.0: dict.fromkeys((1, 2, 3), 0.5), 100.0: dict.fromkeys((1, 2, 3), 0.7)}
    seconds = dict.fromkeys((1, 2, 3), 50.0)
    arm = {1: 0.6, 2: 0.7, 3: 0.8}  # 0.5, 1, 1.5 doublings, as the curve is the same for all
    log_2, half = math.log(2), 0.5 * 4.302653 / math.sqrt(3)
    factor = speedup(budgets, (arm, seconds)).factor
    assert factor.low == pytest.approx(math.exp(log_2 * (1 - half)))
    # Other slopes: 1.25 doublings for each seed, but 1.1, 1.25 and 1.5 without one of them.
    budgets[100.0] = {1: 0.6, 2: 0.7, 3: 0.8}
    factor = speedup(budgets, ({1: 0.70, 2: 0.75, 3: 0.80}, seconds)).factor
    assert factor.mean == pytest.approx(2**1.25)
    pseudo = interval([3.75 - 2 * 1.1, 3.75 - 2 * 1.25, 3.75 - 2 * 1.5])
    assert factor.low == pytest.approx(2 ** (1.25 - (pseudo.mean - pseudo.low)))


# --- tuning


def test_neighbors_differ_by_one_step_of_one_choice() -> None:
    found = neighbors(Setting(0.1, 4, 4), ("rate", "batch", "steps", "overlap"), gap=4)
    assert found == [
        *(Setting(0.05, 4, 4), Setting(0.2, 4, 4)),  # 4 is the smallest batch
        Setting(0.2, 8, 4),  # the rate moves with the batch
        Setting(0.1, 4, 8),  # 2 steps would leave none for the slow device
        Setting(0.1, 4, 4, overlap=True),
    ]


def test_a_search_goes_on_until_no_neighbor_is_ahead_and_spares_the_worst() -> None:
    asked: set[tuple[float, int]] = set()

    def value(setting: Setting, seed: int) -> float:
        asked.add((setting.rate, seed))
        lucky = 0.16 if seed and setting.rate > 0.4 else 0.0
        return lucky - 0.1 * abs(math.log2(setting.rate / 0.4))

    def around(setting: Setting) -> list[Setting]:
        return neighbors(setting, ("rate",), 1)

    assert search(Setting(0.1), around, value, 0.06) == Setting(0.4)
    assert {one for one in asked if one[0] >= 0.8} == {(0.8, 0)}
    # Within the margin, and ahead in the mean, (-0.1 + 2 x 0.06) / 3, but not by a quarter of it.
    assert search(Setting(0.1), around, value, 0.15) == Setting(0.4)
    assert {one for one in asked if one[0] >= 0.8} == {(0.8, seed) for seed in range(3)}
    assert search(Setting(0.1), around, lambda *_: None, 0.1) is None


# --- rows


def test_rows_survive_a_torn_line(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append("long", {"key": "a"})
    with (tmp_path / "long.jsonl").open("a") as file:
        file.write('{"key": "b')
    assert store.read("long") == [{"key": "a"}]
    store.append("long", {"key": "c"})
    assert store.read("long") == [{"key": "a"}, {"key": "c"}]


def made_up(run: Run, **figures: Any) -> dict[str, Any]:
    row = {"key": run.key, **asdict(run), "commit": "a", "machine": "a", "samples": 100}
    return row | figures


def test_failed_and_unsteady_runs_are_repeated() -> None:
    each = [Run("images", "alone", "loop", "images", Setting(0.1), 100, 1, n) for n in range(5)]
    row = made_up(each[0])
    assert is_due(each[0], [])
    assert not is_due(each[0], [row])
    assert is_due(each[0], [{**row, "error": "no"}] * 2)
    assert not is_due(each[0], [{**row, "error": "no"}] * 3)
    rows = [made_up(run, samples=90 if run.seed == 4 else 100) for run in each]
    assert [is_due(run, rows) for run in each] == [False] * 4 + [True]
    assert not is_due(each[4], [*rows[1:], rows[4], rows[4]])  # the third try counts


def test_rows_of_a_seed_and_of_a_tuned_arm_are_of_one_machine() -> None:
    def rows(machines: str, validated: bool, **changes: Any) -> list[dict[str, Any]]:
        run = Run("images", "alone", "loop", "images", Setting(0.1), 100, 1, 0, False, validated)
        return [made_up(replace(run, **changes), machine=machine) for machine in machines]

    of_seeds = [*rows("aba", False), *rows("b", False, seed=1)]
    assert "".join(row["machine"] for row in on_one_machine(of_seeds)) == "aab"
    tuned = rows("a", True) + rows("bb", True, seed=1) + rows("a", True, kind="ddp", gap=2)
    assert "".join(row["machine"] for row in on_one_machine(tuned)) == "bba"


# --- what is run, and the page


def taken(stage: str, rows: dict[str, list[Any]], value: Callable[[Run], float]) -> None:
    """Take all rows of a stage, with made-up accuracies."""
    while due := stages.due_runs(stage, rows, stages.FULL):
        for run in due:
            figures = {"training_seconds": run.seconds, "loss": -value(run)}
            figures |= {"accuracy": value(run)} if run.task == "images" else {}
            rows[stage].append(made_up(run, **figures))


def test_arms_are_tuned_compared_and_reported(tmp_path: Path) -> None:
    faster = {"alone": 1.0, "blocking": 1.2, "overlapped": 1.32, "models": 1.1, "ddp": 1.1}

    def tuned(run: Run) -> float:
        best = 0.1 if run.kind == "ddp" else 0.025
        return 0.5 - 0.02 * abs(math.log2(run.setting.rate / best)) + 0.01 * run.setting.overlap

    def reached(run: Run) -> float:
        return 0.5 + 0.1 * math.log(run.seconds * faster.get(run.arm, 1.0) / 100)

    rows: dict[str, list[Any]] = {stage: [] for stage in stages.STAGES}
    assert stages.STAGES["images"](rows, stages.FULL) == []
    taken("images-tuning", rows, tuned)
    found = stages.Tuning("images", rows, stages.FULL).found
    # The rate moves with the batch, of which the first of equal values is kept.
    assert found["alone", 1] == Setting(0.025, 16, 8, "per-sample")
    assert found["ddp", 4] == Setting(0.1, 16, 8, "per-sample")
    assert found["overlapped", 2] == Setting(0.025, 16, 8, "per-sample", overlap=True)
    assert not {row["seed"] for row in rows["images-tuning"]} & {1400, 1401}

    taken("images", rows, reached)
    assert Counter(row["arm"] for row in rows["images"])["alone"] == 2 * 10
    page = report.page(rows, stages.FULL, picture=True)
    assert "| `overlapped` | 2 | `alone` | 1.32 [1.32, 1.32] (10 of 10 extrapolated) |" in page
    assert "| `overlapped` | 2 | `blocking` | 1.10 [1.10, 1.10] (10 of 10 extrapolated) |" in page
    assert "| `ddp` | 4 | `alone` | 1.10 [1.10, 1.10] | 1.10" in page
    assert report.better_models("images", 2, rows, stages.FULL) == "overlapped"
    assert report.draw(rows, stages.FULL, tmp_path / "picture.png")

    rows["images"].pop()
    assert "**Not complete: 1 runs are due." in report.page(rows, stages.FULL, picture=False)


def test_the_regret_of_auto_is_that_to_the_best_of_the_grid() -> None:
    rows = []
    for run_steps, rate in ((0, 95.0), (3, 90.0), (6, 100.0)):
        run = Run(
            "auto", "recommended", "recommended", "images", Setting(0.1, 16, run_steps), 20, 3, 0
        )
        more = {"local_steps": [4, 1], "fast_waiting_share": 0.02}
        rows.append(made_up(run, samples_per_second=rate, accuracy=rate / 200, **more))
    assert list(report.auto_lines(rows))[-1] == "|  | 3 | 4/1 | 6 | 5.0 % | 2.5 | 2.0 % | 1 |"


# --- tasks and rivals


def test_an_adapter_begins_as_the_frozen_model() -> None:
    torch.manual_seed(0)
    model, whole = adapted(), Transformer()
    own = {name.replace(".layer.", "."): one for name, one in model.state_dict().items()}
    whole.load_state_dict({name: own[name] for name in whole.state_dict()})
    tokens = torch.randint(0, 256, (2, 64), dtype=torch.uint8)
    assert torch.equal(model(tokens), whole(tokens))
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert len(trained) == 2 * 4 * 5  # of four layers in each of five blocks
    assert all(".first." in name or ".second." in name for name in trained)
    changed = tokens.clone()
    changed[:, 40:] = 0
    assert torch.allclose(whole(changed)[:, :40], whole(tokens)[:, :40], atol=1e-6)  # causal


def normalized() -> Task:
    """Return a task whose samples depend on their batch."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(96, 3, 8, 8, generator=draw)
    labels = (images.mean((1, 2, 3)) > 0).long()
    samples = images, labels

    def model() -> nn.Module:
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 36, 2))

    return Task(model=model, train=samples, test=samples)


@pytest.mark.processes
@pytest.mark.parametrize("task", ["digits", "tests.benchmarks.test_study:normalized"])
def test_ddp_in_proportion_is_sgd_with_the_whole_batch(tmp_path: Path, task: str) -> None:
    work = {"task": task, "data": "", "model": "cnn" if task == "digits" else "", "weight-decay": 0}
    together = loop.Settings(work, 3, 0.05, 0.0, [0], [1], [48], steps=12)
    apart = asdict(together) | {"cores": [0, 0], "gaps": [1, 2], "batches": [32, 16]}
    apart |= {"sync_bn": task != "digits", "folder": str(tmp_path)}
    commands = [runs.command("loop", {**apart, "rank": rank}) for rank in range(2)]
    found = runs.done(commands, tmp_path, 240.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = loop.train(together)
    finally:
        torch.set_num_threads(threads)
    assert found["samples"] == whole["samples"] == 12 * 48
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-4)
