"""Sum up the rounds of a run on two clocks: as measured, and on simulated devices."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..algorithm.local_steps import Clock
from ..strategy.round_metrics import RoundRecord, waiting_share
from ..strategy.run_clock import RunClock
from .folder import RunFolder

Figures = dict[str, Any]
"""Figures that the cost model predicts of a run, or the same as measured, by name."""


class RunMetrics(RunClock):
    """The rounds of a run, and their sums.

    `records` are all rounds, as measured, and `samples` those that all workers trained on.
    `seconds_per_step` has the known seconds per step of each worker alone, by worker index. Waiting
    is computed with the times of `clock`.
    """

    def __init__(self, clock: Clock = "wall") -> None:
        super().__init__(clock)
        self.seconds_per_step: Mapping[int, float] = {}
        self.records: list[RoundRecord] = []
        self.samples = 0
        self._on_clock: list[RoundRecord | None] = []

    def add(self, record: RoundRecord, seconds_per_step: Mapping[int, float]) -> RoundRecord | None:
        """Add a round, see `RunClock.add`."""
        on_clock = super().add(record, seconds_per_step)
        self.seconds_per_step = seconds_per_step
        self.samples += sum(row.num_examples for row in record.workers)
        self.records.append(record)
        self._on_clock.append(on_clock)
        return on_clock

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
    seconds_per_step = dict(zip(trained, alone, strict=False))
    for record in records:
        metrics.add(record, seconds_per_step)
    return metrics


def measured_figures(metrics: RunMetrics) -> Figures | None:
    """Return the figures that the cost model predicts, as measured on the run's clock.

    None without a round, or if the clock is "device" and a speed is unknown.
    """
    if not metrics.records or (metrics.clock == "device" and metrics.device_seconds is None):
        return None
    return {
        "clock": metrics.clock,
        "round_seconds": metrics.budget_seconds / len(metrics.records),
        "epoch_seconds": metrics.budget_seconds / metrics.records[-1].epochs_done,
        "fast_waiting_share": metrics.waiting_share(fast=True),
        "slow_waiting_share": metrics.waiting_share(fast=False),
    }
