"""Sum up the rounds of a run on two clocks: as measured, and on simulated devices."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..algorithm.local_steps import Clock
from ..strategy.round_metrics import RoundRecord, waiting_share
from .folder import RunFolder

Figures = dict[str, Any]
"""Figures that the cost model predicts of a run, or the same as measured, by name."""


def on_own_devices(
    record: RoundRecord, seconds_per_step: Mapping[int, float]
) -> RoundRecord | None:
    """Return a round with the times it would take if each worker had its own device.

    Computing lasts as long as that of the slowest worker, by its completed steps and its seconds
    per step *alone*, with its full batch, given by worker index; transfer and averaging are as
    measured. None if the speed or the times of a worker that did a step are unknown.
    """
    rows = [row for row in record.workers if row.completed_steps]
    loads = {row.worker: row.completed_steps * row.batch_scale for row in rows}
    compute = {worker: load * seconds_per_step.get(worker, 0.0) for worker, load in loads.items()}
    if record.workers and all(row.failure for row in record.workers):
        return record  # it timed out; device speed does not matter
    if not rows or not all(compute[row.worker] > 0 and row.compute_seconds > 0 for row in rows):
        return None
    # Workers that share cores may run one after another, so all of this time is computing.
    first_start = min(row.start_seconds for row in rows)
    last_end = max(row.start_seconds + row.compute_seconds for row in rows)
    transfer_and_averaging = max(0.0, record.round_seconds - (last_end - first_start))
    longest = max(compute.values())
    workers = [
        replace(
            row,
            start_seconds=0.0,
            compute_seconds=compute.get(row.worker, row.compute_seconds),
            waiting_seconds=longest - compute.get(row.worker, longest),
        )
        for row in record.workers
    ]
    return replace(record, round_seconds=longest + transfer_and_averaging, workers=tuple(workers))


class RunMetrics:
    """The rounds of a run, and their sums.

    Waiting and the budget are computed with the times of `clock`. `seconds_per_step` has the known
    seconds per step of each worker alone, by worker index, and may be replaced before each round.
    `records` are all rounds, as measured. `training_seconds` is the measured time of rounds and
    planning, without set-up, evaluation and checkpoints. `device_seconds` is the computed time of
    the rounds if each worker had its own device; None without a round or if one is unknown.

    `budget_seconds` and `last_budget_seconds` are what all rounds, and the last one, count against
    a budget: on the wall clock measured planning and rounds, on the device clock computed rounds. A
    round whose computed time is unknown, and all rounds after it, count as measured.
    """

    def __init__(self, clock: Clock = "wall") -> None:
        self.clock = clock
        self.seconds_per_step: Mapping[int, float] = {}
        self.records: list[RoundRecord] = []
        self.samples = 0
        self.training_seconds = 0.0
        self.device_seconds: float | None = None
        self.budget_seconds = 0.0
        self.last_budget_seconds = 0.0
        self._on_clock: list[RoundRecord | None] = []

    def add(self, record: RoundRecord) -> None:
        """Add one round to the sums."""
        seconds = record.planning_seconds + record.round_seconds
        self.training_seconds += seconds
        computed = on_own_devices(record, self.seconds_per_step)
        before = self.device_seconds if self.records else 0.0
        if computed is None or before is None:
            self.device_seconds = None
        else:
            self.device_seconds = before + computed.round_seconds
            if self.clock == "device":
                seconds = computed.round_seconds
        self.last_budget_seconds = seconds
        self.budget_seconds += seconds
        self.samples += sum(row.num_examples for row in record.workers)
        self.records.append(record)
        self._on_clock.append(computed if self.clock == "device" else record)

    def waiting_share(self, fast: bool, last_round: bool = False) -> float | None:
        """Return a tier's waiting / (its workers x sum of round seconds), on the run's clock.

        Covers all rounds, or the last one. None if no worker of the tier trains, or times are
        unknown.
        """
        rounds = self._on_clock[-1:] if last_round else self._on_clock
        known = [record for record in rounds if record is not None]
        if len(known) < len(rounds):
            return None
        return waiting_share(((record.round_seconds, record.workers) for record in known), fast)

    def rounds_on_clock(self, first: int = 0) -> list[RoundRecord]:
        """Return the rounds from index `first` whose times on the run's clock are known."""
        return [record for record in self._on_clock[first:] if record is not None]

    def longer_for_slow(self) -> float | None:
        """Return how much longer rounds were because of slow workers, as a share.

        Without slow workers a round would end with its last fast worker. None if times are unknown.
        """
        whole = without_slow = 0.0
        for record in self._on_clock:
            if record is None:
                return None
            of_fast = [w.waiting_seconds for w in record.workers if w.fast and not w.failure]
            whole += record.round_seconds
            without_slow += record.round_seconds - min(of_fast, default=0.0)
        return whole / without_slow - 1 if without_slow else None


def metrics_of(folder: Path, summary: Mapping[str, Any]) -> RunMetrics:
    """Return the rounds in the folder of a finished run, and their sums."""
    metrics = RunMetrics(summary["clock"])
    records = RunFolder(folder).rounds_until(sys.maxsize)
    trained = sorted({row.worker for record in records for row in record.workers if row.trained})
    alone = [worker["seconds_per_step_alone"] or 0.0 for worker in summary["workers"]]
    metrics.seconds_per_step = dict(zip(trained, alone, strict=False))
    for record in records:
        metrics.add(record)
    return metrics


def measured_figures(metrics: RunMetrics) -> Figures | None:
    """Return the figures that the cost model predicts, as measured on the run's clock.

    None without a round, or if the clock is "device" and a speed is unknown.
    """
    if not metrics.records or (metrics.clock == "device" and metrics.device_seconds is None):
        return None
    last = metrics.records[-1]
    epochs = last.epoch - 1 + last.round_in_epoch / last.rounds_in_epoch
    return {
        "clock": metrics.clock,
        "round_seconds": metrics.budget_seconds / len(metrics.records),
        "epoch_seconds": metrics.budget_seconds / epochs,
        "fast_waiting_share": metrics.waiting_share(fast=True),
        "slow_waiting_share": metrics.waiting_share(fast=False),
    }
