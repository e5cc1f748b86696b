"""What to expect of every algorithm, before any training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from flower_blsgd.algorithm.catalog import ALGORITHMS
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.experiments.cost_model import Prediction
from flower_blsgd.experiments.plan import Plan, plan_runs
from flower_blsgd.runtime.devices import WorkerSpec

EIGHT_AND_TWO = [
    *[WorkerSpec("cuda", tier="fast", seconds_per_step=0.01)] * 8,
    *[WorkerSpec("cpu", (0,), "slow", seconds_per_step=0.22)] * 2,
]
"""The paper's 2C+8G, with slow devices that are 22 times slower."""

NUM_SAMPLES = 50_000


def settings(**changes: Any) -> RunConfig:
    return RunConfig(**{"batch_size": 32, "local_steps_slow": "auto", **changes})


def planned(
    *algorithms: str, workers: Sequence[WorkerSpec] = EIGHT_AND_TWO, **changes: Any
) -> Plan:
    return plan_runs(settings(**changes), workers, NUM_SAMPLES, algorithms)


def prediction(algorithm: str, **changes: Any) -> Prediction:
    (row,) = planned(algorithm, **changes).rows
    assert row.algorithm == algorithm
    assert row.refusal == ""
    assert row.prediction is not None
    return row.prediction


def test_biased_with_eight_and_two_at_22_times_hand_worked() -> None:
    """Gamma is 1/22: floor(32/22 + 1/2) = 1 step; a round has 8 x 32 + 2 = 258 steps of 32."""
    found = prediction("biased-local-sgd")
    assert found.local_steps == (32,) * 8 + (1,) * 2
    assert found.batch_sizes == (32,) * 10
    assert found.weights == pytest.approx((32 / 258,) * 8 + (1 / 258,) * 2)
    assert found.rounds_per_epoch == pytest.approx(50_000 / 8_256)
    assert found.round_seconds == pytest.approx(0.32)
    assert found.epoch_seconds == pytest.approx(0.32 * 50_000 / 8_256)
    assert found.fast_waiting_share == 0.0
    assert found.slow_waiting_share == pytest.approx(0.1 / 0.32)  # 0.22 s of 0.32
    assert found.samples_per_second == pytest.approx(8_256 / 0.32)


@pytest.mark.parametrize(
    ("algorithm", "steps", "slow_weight", "round_seconds", "rounds", "fast_waits"),
    [
        ("unbiased-local-sgd", (32, 1), 0.2, 0.32, 50_000 / 8_256, 0.0),
        ("balanced-local-sgd", (32, 32), 0.2, 7.04, 50_000 / 10_240, 6.72 / 7.04),
        ("sync-sgd", (1, 1), 0.2, 0.22, 50_000 / 320, 0.21 / 0.22),
    ],
)
def test_rivals_hand_worked(
    algorithm: str,
    steps: tuple[int, int],
    slow_weight: float,
    round_seconds: float,
    rounds: float,
    fast_waits: float,
) -> None:
    found = prediction(algorithm)
    assert found.local_steps == (steps[0],) * 8 + (steps[1],) * 2
    assert sum(found.weights[8:]) == pytest.approx(slow_weight)
    assert found.round_seconds == pytest.approx(round_seconds)
    assert found.rounds_per_epoch == pytest.approx(rounds)
    assert found.fast_waiting_share == pytest.approx(fast_waits)


def test_fast_only_has_the_fast_workers_alone() -> None:
    plan = planned("fast-only-local-sgd")
    (row,) = plan.rows
    assert len(plan.workers) == 10
    assert len(row.workers) == 8
    assert all(worker.fast for worker in row.workers)
    assert row.prediction is not None
    assert row.prediction.local_steps == (32,) * 8
    assert row.prediction.epoch_seconds == pytest.approx(0.32 * 50_000 / 8_192)
    assert row.prediction.slow_waiting_share is None


def test_ceiling_and_team_hand_worked() -> None:
    plan = planned("biased-local-sgd")
    assert plan.ceiling == pytest.approx((8 * 100 + 2 / 0.22) / (8 * 100))  # 1.0114
    assert plan.num_samples == NUM_SAMPLES
    assert [worker.speed_ratio for worker in plan.workers] == pytest.approx([1] * 8 + [1 / 22] * 2)
    # Each keeps the place that it has in the specification, also where it ranks elsewhere.
    slow_first = planned("biased-local-sgd", workers=EIGHT_AND_TWO[::-1])
    assert [w.profile.partition_id for w in slow_first.workers] == [2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_slow_one_that_is_slower_than_a_round_gets_a_smaller_batch() -> None:
    """Gamma tau is 32/100 < 3/4: one step of floor(0.32 x 32 + 1/2) = 10 samples."""
    workers = [
        WorkerSpec("cpu", tier="fast", seconds_per_step=0.01),
        WorkerSpec("cpu", tier="slow", seconds_per_step=1.0),
    ]
    found = prediction("biased-local-sgd", workers=workers)
    assert (found.local_steps, found.batch_sizes) == ((32, 1), (32, 10))
    assert found.round_seconds == pytest.approx(0.32)  # 10/32 of a second is less
    whole = prediction("biased-local-sgd", workers=workers, shrink_slow_batch=False)
    assert whole.round_seconds == pytest.approx(1.0)


def test_overhead_is_in_every_round() -> None:
    config = settings()
    (row,) = plan_runs(config, EIGHT_AND_TWO, NUM_SAMPLES, ["biased-local-sgd"], 0.08).rows
    assert row.prediction is not None
    assert row.prediction.round_seconds == pytest.approx(0.4)


def test_all_algorithms_in_their_order_and_the_settings_own_is_nothing_special() -> None:
    plan = plan_runs(settings(algorithm="dlb"), EIGHT_AND_TWO, NUM_SAMPLES)
    assert [row.algorithm for row in plan.rows] == list(ALGORITHMS)
    assert all(row.prediction is not None for row in plan.rows)
    assert plan == plan_runs(settings(), EIGHT_AND_TWO, NUM_SAMPLES)


def test_refused_rows_say_why_and_the_others_are_planned() -> None:
    only_fast = EIGHT_AND_TWO[:8]
    plan = planned("biased-local-sgd", "sync-sgd", workers=only_fast)
    refused, fine = plan.rows
    assert refused.prediction is None
    assert refused.workers == ()
    assert "no slow worker" in refused.refusal
    assert "\n" not in refused.refusal
    assert fine.prediction is not None
    assert plan.ceiling == 1.0


def test_team_without_a_fast_one_has_no_ceiling() -> None:
    plan = planned("sync-sgd", "fast-only-local-sgd", workers=EIGHT_AND_TWO[8:])
    assert plan.ceiling is None
    assert plan.rows[0].prediction is not None
    assert plan.rows[1].refusal


def test_batch_larger_than_the_data_refuses_every_row() -> None:
    plan = plan_runs(settings(), EIGHT_AND_TWO, 20)
    assert all("batch-size = 32" in row.refusal for row in plan.rows)


@pytest.mark.parametrize("place", [0, 9])
def test_unknown_speed_is_refused_with_the_device_and_the_way_out(place: int) -> None:
    workers = list(EIGHT_AND_TWO)
    workers[place] = replace(workers[place], seconds_per_step=None)
    with pytest.raises(UsageError) as error:
        plan_runs(settings(), workers, NUM_SAMPLES)
    line = str(error.value)
    assert line.startswith(f"the speed of {workers[place].device_with_cores} is not known")
    assert "blsgd calibrate" in line
    assert "seconds-per-step=" in line


def test_unnamed_workers_are_ranked_by_the_threshold() -> None:
    workers = [WorkerSpec("cpu", seconds_per_step=seconds) for seconds in (0.01, 0.0125, 0.02)]
    tiers = [worker.fast for worker in planned("sync-sgd", workers=workers).workers]
    assert tiers == [True, True, False]
    tiers = [
        worker.fast for worker in planned("sync-sgd", workers=workers, fast_threshold=0.4).workers
    ]
    assert tiers == [True, True, True]
