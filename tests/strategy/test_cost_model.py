"""Predictions of a round and of whole runs, worked by hand."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from flower_blsgd.algorithm.averaging import LoadWeighting, Weighting
from flower_blsgd.algorithm.catalog import register_part
from flower_blsgd.config import RunConfig
from flower_blsgd.parts import make_strategy
from flower_blsgd.protocol import WorkerProfile
from flower_blsgd.strategy.cost_model import Prediction, predict_run, slow_device_lines
from flower_blsgd.strategy.workers import WorkerRegistry

from ..in_process_grid import fast_profile, slow_profile
from ..refusal import refusal

# --- of a strategy and its workers

WORKERS = (
    fast_profile(0, seconds_per_step=0.5),
    fast_profile(1, seconds_per_step=0.5),
    slow_profile(2, seconds_per_step=2.0),
)


def prediction_of(
    *profiles: WorkerProfile, num_samples: int = 800, overhead: float = 0.0, **settings: Any
) -> Prediction | None:
    arguments = {"batch_size": 10, "local_steps_fast": 8, "local_steps_slow": "auto"} | settings
    team = profiles or WORKERS
    strategy = make_strategy(RunConfig(**arguments), num_samples, len(team))
    return predict_run(strategy, WorkerRegistry.of_profiles(team).workers, overhead)


def of_workers(found: Prediction, name: str) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for row in found.workers)


class Logarithm(Weighting):
    """Of the number of samples, and of two workers only."""

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        logs = [math.log(load) for load in completed_loads]
        assert len(logs) == 2
        return [log / sum(logs) for log in logs]


def test_custom_weighting_gets_samples_and_may_need_all_workers() -> None:
    found = prediction_of(*WORKERS[1:], weights=register_part("weights", Logarithm()))
    assert found is not None  # 8 and 2 steps of 10 samples
    logs = math.log(80), math.log(20)
    assert of_workers(found, "weight") == pytest.approx([log / sum(logs) for log in logs])
    workers = WorkerRegistry.of_profiles(WORKERS[1:]).workers
    speeds = [(worker, worker.samples_per_second(10)) for worker in workers]
    assert slow_device_lines(speeds, 10, Logarithm(), 0.0) == []
    assert len(slow_device_lines(speeds, 10, LoadWeighting(), 0.0)) == 1


def test_biased_worked() -> None:
    """8 steps of 0.5 s, and gamma 1/4: 2 of 2 s. 180 samples a round, 800 in an epoch."""
    found = prediction_of(overhead=1.0)
    assert found is not None
    assert of_workers(found, "local_steps") == (8, 8, 2)
    assert found.round_seconds == 5.0
    assert found.rounds_per_epoch == pytest.approx(800 / 180)
    assert found.epoch_seconds == pytest.approx(5 * 800 / 180)
    assert of_workers(found, "weight") == pytest.approx((8 / 18, 8 / 18, 2 / 18))
    assert of_workers(found, "worker") == (0, 1, 2)
    assert found.samples_per_second == 180 / 5
    assert (found.waiting_share(fast=True), found.waiting_share(fast=False)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("algorithm", "steps", "seconds", "fast_waits", "per_round"),
    [
        ("balanced-local-sgd", (8, 8, 8), 16.0, 0.75, 240),
        ("sync-sgd", (1, 1, 1), 2.0, 0.75, 30),
        ("fast-only-local-sgd", (8, 8), 4.0, 0.0, 160),
        ("sync-sgd-fast-only", (1, 1), 0.5, 0.0, 20),
        ("byteps", (1, 1), 0.5, 0.0, 20),
        ("fednova", (8, 8, 2), 4.0, 0.0, 180),
    ],
)
def test_other_algorithms_worked(
    algorithm: str, steps: tuple[int, ...], seconds: float, fast_waits: float, per_round: int
) -> None:
    found = prediction_of(algorithm=algorithm)
    assert found is not None
    assert (of_workers(found, "local_steps"), found.round_seconds) == (steps, seconds)
    assert found.waiting_share(fast=True) == fast_waits
    assert found.rounds_per_epoch == pytest.approx(800 / per_round)
    assert (found.waiting_share(fast=False) is None) == (len(steps) == 2)


def test_batches_of_their_own_worked() -> None:
    """8 steps of 10 in 4 s; steps of 4 take 0.8 s: gamma 5/8, 5 of them. 100 samples a round."""
    team = (
        fast_profile(0, seconds_per_step=0.5),
        slow_profile(1, seconds_per_step=0.8, batch_size=4),
    )
    found = prediction_of(*team)
    assert found is not None
    assert of_workers(found, "local_steps") == (8, 5)
    assert of_workers(found, "num_examples") == (80, 20)
    assert of_workers(found, "compute_seconds") == (4.0, 4.0)
    assert of_workers(found, "weight") == pytest.approx((0.8, 0.2))
    assert found.rounds_per_epoch == 8.0


def test_nothing_is_predicted_where_a_speed_of_one_who_trains_is_not_known() -> None:
    team = (fast_profile(0, seconds_per_step=0.5), slow_profile(1))
    assert prediction_of(*team, local_steps_slow=2) is None
    found = prediction_of(*team, algorithm="sync-sgd-fast-only")  # the slow one does nothing
    assert found is not None
    assert of_workers(found, "local_steps") == (1,)


def test_workers_that_cannot_begin_is_refused() -> None:
    line = refusal(prediction_of, *WORKERS[:2], algorithm="biased-local-sgd")
    assert "no slow worker" in line
    # a speed is known of all, but the batch does not fit
    assert "largest that fits is batch-size = 8" in refusal(prediction_of, num_samples=24)
