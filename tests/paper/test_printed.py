"""The paper's tables, which of their figures are arithmetic, and its times by the cost model.

Three of its rows differ only in how often models are averaged and in who trains: they give seconds
of a step and of a communication, and the cost model of ``blsgd plan`` those of every algorithm.
"""

import pytest

from flower_blsgd.algorithm.catalog import ALGORITHMS
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.experiments.plan import plan_runs
from flower_blsgd.paper.reproductions import COMPUTED, MEASURED, label, printed
from flower_blsgd.strategy.cost_model import Prediction

SECONDS = "wall_clock_s"


def seconds_of(dataset: str) -> dict[tuple[str, int], float]:
    rows = [row for row in printed("comparison_2c8g") if row["dataset"] == dataset]
    return {(row["algorithm"], int(row["epochs"])): float(row[SECONDS]) for row in rows}


def test_tables_have_every_row_and_figures_in_every_cell() -> None:
    lengths = {
        **{"bias_1c1g": 15, "bias_2c8g": 15, "comparison_2c8g": 24, "fast_only_vs_mixed": 6},
        **{"sampling_schemes_2c8g": 6, "hyperparameters": 10},
    }
    tables = {name: printed(name) for name in lengths}
    assert {name: len(rows) for name, rows in tables.items()} == lengths
    assert all(all(row.values()) and None not in row for rows in tables.values() for row in rows)
    row = tables["bias_2c8g"][2]
    assert (row["dataset"], row["tau_slow"], row["unbiased_spread"]) == ("cifar10", "1", "0.2")


@pytest.mark.parametrize(
    ("dataset", "epochs"), [("cifar10", 100), ("flowers102", 300), ("cifar100", 200)]
)
def test_seconds_labelled_computed_follow_from_others(dataset: str, epochs: int) -> None:
    """To one unit of the last printed digit; none of those labelled measured does."""
    seconds = seconds_of(dataset)
    sync, fast = seconds["sync-sgd", epochs], seconds["sync-sgd-fast-only", epochs]
    rules = {("biased-local-sgd", times * epochs): times * sync / 32 for times in (1, 2, 3)}
    rules["dlb", epochs] = 0.8 * fast
    for row in printed("comparison_2c8g"):
        if row["dataset"] == dataset:
            what = row["algorithm"], int(row["epochs"])
            assert label(row, SECONDS) == (COMPUTED if what in rules else MEASURED)
            assert what not in rules or seconds[what] == pytest.approx(rules[what], abs=0.011)
            assert label(row, "accuracy") == MEASURED
    for row in printed("fast_only_vs_mixed"):
        if row["dataset"] == dataset:
            mixed = row["workers"] == "2cpu+8gpu"
            assert label(row, SECONDS) == (COMPUTED if mixed else MEASURED)
            same = float(row[SECONDS]) == seconds["biased-local-sgd", epochs]
            assert same == mixed
            assert float(row[SECONDS]) != pytest.approx(fast / 32, rel=0.01)


# --- the times of the paper's devices, by the cost model


def refitted_times(dataset: str) -> tuple[float, float, float]:
    """Return the seconds of a fast step, of a slow one and of a communication.

    They give three of the paper's rows exactly. With K communications of synchronous SGD, R of
    balanced local SGD (of tau steps each, so that R tau = K) and K_f of synchronous SGD on the fast
    workers alone::

        T_sync = K (s + c)    T_balanced = K s + R c    T_fast = K_f (f + c)
    """
    rows = [row for row in printed("comparison_2c8g") if row["dataset"] == dataset]
    counts = {r["algorithm"]: int(r["epochs"]) * int(r["comm_per_epoch"]) for r in rows}
    seconds = {r["algorithm"]: float(r[SECONDS]) for r in rows}
    (sync, balanced, fast) = ("sync-sgd", "balanced-local-sgd", "sync-sgd-fast-only")
    communication = (seconds[sync] - seconds[balanced]) / (counts[sync] - counts[balanced])
    fast_step, slow_step = (seconds[n] / counts[n] - communication for n in (fast, sync))
    return fast_step, slow_step, communication


@pytest.mark.parametrize(
    ("dataset", "epochs", "milliseconds", "seconds", "over_printed"),
    [
        # 400 rounds of 32 x 16.66 + 60.51 ms: the fast workers are the slower ones.
        ("cifar10", 100, (16.66, 40.92, 60.51), 237.45, 5.852),
        # 600 rounds of 32 x 56.93 + 62.49 ms.
        ("flowers102", 300, (56.93, 1742.7, 62.49), 1130.54, 1.0438),
        # 800 rounds of 1670.70 + 1477.83 ms: the slow ones are, so a round is one of sync SGD.
        ("cifar100", 200, (27.81, 1670.7, 1477.8), 2518.83, 1.0),
    ],
)
def test_cost_model_prints_the_wall_clock_column_but_for_the_proposed_method(
    dataset: str,
    epochs: int,
    milliseconds: tuple[float, ...],
    seconds: float,
    over_printed: float,
) -> None:
    fast, slow, communication = times = refitted_times(dataset)
    assert [1000 * each for each in times] == pytest.approx(milliseconds, rel=3e-4)
    (size,) = (
        int(row["batch_size"])
        for row in printed("hyperparameters")
        if (row["setting"], row["dataset"]) == ("2c8g", dataset)
    )
    config = RunConfig(epoch="table", batch_size=size, local_steps_fast=32, local_steps_slow=1)
    workers = [WorkerSpec("cuda", tier="fast", seconds_per_step=fast)] * 8
    workers += [WorkerSpec("cpu", tier="slow", seconds_per_step=slow)] * 2
    num_samples = 7_169 if dataset == "flowers102" else 50_000
    plan = plan_runs(config, workers, num_samples, tuple(ALGORITHMS), communication)
    predicted = {n: p for n, p in plan.expected.items() if isinstance(p, Prediction)}
    found = {name: epochs * each.epoch_seconds for name, each in predicted.items()}
    column = seconds_of(dataset)
    for name in ("sync-sgd", "balanced-local-sgd", "sync-sgd-fast-only"):
        assert found[name] == pytest.approx(column[name, epochs])
    assert found["biased-local-sgd"] == pytest.approx(seconds, abs=0.01)
    ratio = found["biased-local-sgd"] / column["biased-local-sgd", epochs]
    assert ratio == pytest.approx(over_printed, rel=1e-3)
