"""Seconds of the rounds on the run's clock: as measured, or on simulated devices."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..algorithm.local_steps import Clock
from .round_metrics import RoundRecord


def on_own_devices(
    record: RoundRecord, seconds_per_step: Mapping[int, float], with_workers: bool = True
) -> RoundRecord | None:
    """Return a round with the times it would take if each worker had its own device.

    Computing lasts as long as that of the slowest worker, by its completed steps and its seconds
    per step *alone*, with its full batch, given by worker index; transfer and averaging are as
    measured. None if the speed or the times of a worker that did a step are unknown. The times of
    each worker are changed only `with_workers`.
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
    others = max(0.0, record.round_seconds - (last_end - first_start))
    longest = max(compute.values())
    workers = [
        replace(
            row,
            start_seconds=0.0,
            compute_seconds=compute.get(row.worker, row.compute_seconds),
            waiting_seconds=longest - compute.get(row.worker, longest),
        )
        for row in record.workers
        if with_workers
    ]
    changed = tuple(workers) or record.workers
    return replace(record, round_seconds=longest + others, workers=changed)


@dataclass
class RunClock:
    """Sums of the rounds' seconds.

    `training_seconds` is the measured time of rounds and planning, without set-up, evaluation and
    checkpoints. `device_seconds` is the computed time of the rounds if each worker had its own
    device; None without a round or if one is unknown. `budget_seconds` and `last_budget_seconds`
    are what all rounds, and the last one, count against a budget: on the wall clock measured
    planning and rounds, on the device clock computed rounds. A round whose computed time is
    unknown, and all rounds after it, count as measured. `added_at` is when the last round ended, on
    the clock of `time.monotonic`.
    """

    clock: Clock = "wall"
    training_seconds: float = 0.0
    device_seconds: float | None = None
    budget_seconds: float = 0.0
    last_budget_seconds: float = 0.0
    rounds: int = 0
    added_at: float = 0.0

    def add(self, record: RoundRecord, seconds_per_step: Mapping[int, float]) -> RoundRecord | None:
        """Add a round, and return it with the times of the run's clock; None if unknown.

        `seconds_per_step` has those of each worker alone, as far as known, by worker index.
        """
        seconds = record.planning_seconds + record.round_seconds
        self.training_seconds += seconds
        computed = on_own_devices(record, seconds_per_step, self.clock == "device")
        before = self.device_seconds if self.rounds else 0.0
        if computed is None or before is None:
            self.device_seconds = None
        else:
            self.device_seconds = before + computed.round_seconds
            if self.clock == "device":
                seconds = computed.round_seconds
        self.last_budget_seconds = seconds
        self.budget_seconds += seconds
        self.rounds += 1
        self.added_at = time.monotonic()
        return computed if self.clock == "device" else record
