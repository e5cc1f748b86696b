"""The sums over a run's rounds, as measured and as if each worker had its own device."""

import dataclasses
from collections.abc import Mapping

import pytest

from flower_blsgd.algorithm.local_steps import Clock
from flower_blsgd.results.round_totals import (
    RunMetrics,
    measured_figures,
)
from flower_blsgd.results.summary import plan_line
from flower_blsgd.strategy.round_metrics import RoundRecord
from flower_blsgd.strategy.run_clock import on_own_devices

from .records import SPEEDS, record, row, two_rounds


def metrics_of(
    *records: RoundRecord, clock: Clock = "wall", speeds: Mapping[int, float] | None = None
) -> RunMetrics:
    metrics = RunMetrics(clock)
    for one in records:
        metrics.add(one, speeds or {})
    return metrics


def test_sums_and_shares_hand_worked() -> None:
    """Waiting of the tier / (its workers x sum of round_seconds)."""
    metrics = metrics_of(*two_rounds())
    assert metrics.samples == 64 + 64 + 16 + 64 + 0 + 32
    assert metrics.training_seconds == metrics.budget_seconds == 16.75
    assert metrics.last_budget_seconds == 6.25
    assert metrics.waiting_share(fast=True) == (3.0 + 5.0) / (2 * 16.0)
    assert metrics.waiting_share(fast=False) == 1.0 / (1 * 16.0)
    assert metrics.waiting_share(fast=False, last_round=True) == 1.0 / 6.0
    assert metrics.longer_for_slow() == pytest.approx(3 / 13)  # only the first round is
    assert metrics.device_seconds is None


def test_shares_of_a_worker_that_changes_its_tier() -> None:
    """Worker 1 is slow in the first of two rounds, and fast in the second."""
    metrics = metrics_of(
        record(row(0, waiting_seconds=1.0), row(1, fast=False, waiting_seconds=6.0)),
        record(row(0, waiting_seconds=1.0), row(1, waiting_seconds=2.0), round=2),
    )
    assert metrics.waiting_share(fast=False) == 6.0 / 10.0
    assert metrics.waiting_share(fast=True) == (1.0 + 1.0 + 2.0) / (10.0 + 2 * 10.0)


def test_device_clock_hand_worked() -> None:
    """The fast ones wait 1, 0 and 4 s, the slow one 1 s; the one that failed waits for nobody."""
    metrics = metrics_of(*two_rounds(), clock="device", speeds=SPEEDS)
    assert metrics.device_seconds == metrics.budget_seconds == 15.0
    assert metrics.training_seconds == 16.75
    assert metrics.waiting_share(fast=True) == 5 / (2 * 15)
    assert metrics.waiting_share(fast=False) == 1 / 15
    assert metrics.longer_for_slow() == pytest.approx(4 / 11)
    # On the wall clock they are computed beside what is measured.
    wall = metrics_of(*two_rounds(), speeds=SPEEDS)
    assert (wall.device_seconds, wall.waiting_share(fast=True)) == (15.0, 0.25)


@pytest.mark.parametrize("speeds", [{}, {0: 1.0, 1: 1.25}, {**SPEEDS, 1: 0.0}])
def test_device_clock_needs_the_speed_of_everybody_that_took_part(
    speeds: dict[int, float],
) -> None:
    first, second = two_rounds()
    metrics = metrics_of(first, second, clock="device", speeds=speeds)
    assert metrics.device_seconds is None
    assert metrics.waiting_share(fast=True) is None
    assert metrics.longer_for_slow() is None
    assert measured_figures(metrics) is None
    # Not that of one that only failed.
    assert metrics_of(second, speeds={0: 1.0, 2: 4.0}).device_seconds == 9.0


def test_budget_is_device_seconds_up_to_the_first_that_are_unknown() -> None:
    one = record(
        row(0, completed_steps=4, compute_seconds=2.0), planning_seconds=0.5, round_seconds=2.25
    )
    metrics, seconds = RunMetrics("device"), []
    for speeds in ({0: 1.0}, {0: 2.0}, dict[int, float](), {0: 1.0}):
        metrics.add(one, speeds)
        seconds.append(metrics.last_budget_seconds)
    assert seconds == [4.25, 8.25, 2.75, 2.75]
    assert metrics.budget_seconds == 18.0
    assert metrics.device_seconds is None  # whatever comes after


def test_device_clock_counts_a_step_of_half_the_batch_as_half() -> None:
    whole = row(0, completed_steps=4, num_examples=64, start_seconds=1.0, compute_seconds=6.0)
    half = dataclasses.replace(whole, batch_scale=0.5)
    seconds = [metrics_of(record(one), speeds={0: 3.0}).device_seconds for one in (whole, half)]
    assert seconds == [12.0 + 4.0, 6.0 + 4.0]


def test_round_of_workers_in_a_queue() -> None:
    """Four workers take turns on one core: 8 s of computing, of which each alone needs 2 s."""
    rows = [
        row(i, completed_steps=4, start_seconds=0.5 + 2 * i, compute_seconds=2.0) for i in range(4)
    ]
    one = record(*rows, round_seconds=9.25, averaging_seconds=0.25)
    found = on_own_devices(one, dict.fromkeys(range(4), 0.5))
    assert found is not None
    # Moved: 0.5 s before the first and 0.5 s after the last; then 0.25 s of averaging.
    assert found.round_seconds == 2.0 + 1.25
    assert [(w.compute_seconds, w.waiting_seconds) for w in found.workers] == [(2.0, 0.0)] * 4
    assert {w.start_seconds for w in found.workers} == {0.0}


# --- one round as if each worker had its own device


@pytest.mark.parametrize(
    ("steps", "compute", "speed"),
    [(4, 2.0, 0.0), (4, 2.0, -1.0), (4, 2.0, float("nan")), (4, 0.0, 0.5), (0, 0.0, 0.5)],
    ids=["speed 0", "speed below 0", "speed not a number", "no times", "nobody did a step"],
)
def test_round_with_times_that_are_not_known(steps: int, compute: float, speed: float) -> None:
    one = record(row(0, completed_steps=steps, compute_seconds=compute))
    assert on_own_devices(one, {0: speed}) is None


def test_round_that_nobody_answered_took_its_time_on_any_device() -> None:
    one = record(row(0, completed_steps=0, failure="it did not answer in time"))
    assert on_own_devices(one, {0: 0.5}) is one


# --- the figures that the cost model predicts, as measured


def test_measured_figures_hand_worked() -> None:
    """Two rounds of 10 s and 6 s and 0.75 s of planning make one epoch."""
    assert measured_figures(metrics_of(*two_rounds())) == {
        "clock": "wall",
        "round_seconds": 16.75 / 2,
        "epoch_seconds": 16.75,
        "fast_waiting_share": 8.0 / 32,
        "slow_waiting_share": 1.0 / 16,
    }
    # One round of two in the third epoch: 2.5 epochs.
    part = metrics_of(record(row(0), epoch=3, round_in_epoch=1, rounds_in_epoch=2))
    assert (measured_figures(part) or {})["epoch_seconds"] == 10.0 / 2.5
    assert measured_figures(RunMetrics()) is None


def test_plan_line_has_both_and_the_difference() -> None:
    expected = {"epoch_seconds": 4.0, "fast_waiting_share": 0.125}
    took = {"epoch_seconds": 3.0, "fast_waiting_share": None}
    assert plan_line(expected, took) == (
        "plan: 4 s per epoch, fast waits 12%; measured: 3 s (-25%)"
    )
