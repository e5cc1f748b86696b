"""How long a round took: as measured, and as if each worker had a device of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..algorithm.local_steps import Clock
from ..round_log import RoundRecord


@dataclass(frozen=True)
class RoundTimes:
    """One round on one clock.

    Parameters
    ----------
    round_seconds : float
        How long it took.
    waiting_seconds : mapping of int to float
        By worker index: the last worker's end of computing minus the own one; 0 for a worker
        that did not compute.
    """

    round_seconds: float
    waiting_seconds: Mapping[int, float]


def wall_times(record: RoundRecord) -> RoundTimes:
    """Return a round as it was measured."""
    return RoundTimes(
        record.round_seconds, {row.worker: row.waiting_seconds for row in record.workers}
    )


def device_times(record: RoundRecord, seconds_per_step: Mapping[int, float]) -> RoundTimes | None:
    """Return a round as if each worker had its own device.

    The longest of all workers' computing, as computed from their completed steps, and the
    transfer and the averaging that were measured.

    Parameters
    ----------
    record : RoundRecord
        The round.
    seconds_per_step : mapping of int to float
        By worker index: seconds per step of that worker *alone*, with the common batch size.

    Returns
    -------
    RoundTimes or None
        None if the speed or the times of a worker that did a step are not known.

    Examples
    --------
    Two workers shared a core for 9 s and moved data for 1 s; one alone needs 4 s, one 5 s:

    >>> from ..round_log import WorkerRound
    >>> first = WorkerRound(0, "a", True, 2, 2, start_seconds=0.5, compute_seconds=4.0)
    >>> second = WorkerRound(1, "b", True, 1, 1, start_seconds=4.5, compute_seconds=5.0)
    >>> record = RoundRecord(1, 1, 1, 1, 0.1, 0.0, 10.0, 0.25, 0, 1.0, (first, second))
    >>> device_times(record, {0: 2.0, 1: 5.0})
    RoundTimes(round_seconds=6.0, waiting_seconds={0: 1.0, 1: 0.0})
    """
    rows = [row for row in record.workers if row.completed_steps]
    compute = {
        row.worker: row.completed_load * seconds_per_step.get(row.worker, 0.0) for row in rows
    }
    if not rows or not all(compute[row.worker] > 0 and row.compute_seconds > 0 for row in rows):
        return None
    # Workers that share cores may run one after another, so all of this is computing, not only
    # the longest of them.
    first_start = min(row.start_seconds for row in rows)
    last_end = max(row.start_seconds + row.compute_seconds for row in rows)
    transfer_and_averaging = max(0.0, record.round_seconds - (last_end - first_start))
    longest = max(compute.values())
    waiting = {row.worker: longest - compute.get(row.worker, longest) for row in record.workers}
    return RoundTimes(longest + transfer_and_averaging, waiting)


class BudgetClock:
    """What rounds count against a budget in seconds.

    Parameters
    ----------
    clock : {"wall", "device"}
        Planning and rounds as measured; or the rounds as if each worker had its own device, up
        to the first for which that is not known.
    """

    def __init__(self, clock: Clock) -> None:
        self._device_seconds: float | None = 0.0 if clock == "device" else None

    def seconds_of(self, record: RoundRecord, seconds_per_step: Mapping[int, float]) -> float:
        """Return what a round counts; see `device_times`. Each is asked for once, in order."""
        before = self._device_seconds
        times = None if before is None else device_times(record, seconds_per_step)
        if before is None or times is None:
            self._device_seconds = None
            return record.planning_seconds + record.round_seconds
        self._device_seconds = before + times.round_seconds
        return self._device_seconds - before


@dataclass
class ClockSums:
    """A run's rounds on one clock, added up.

    Attributes
    ----------
    round_seconds : float
        Sum over rounds.
    slow_only_seconds : float
        How much shorter the rounds would have been had they ended with the last fast worker.
    waiting_seconds : dict of bool to float
        Sum over the fast workers (True) and the slow ones (False), and over rounds.
    """

    round_seconds: float = 0.0
    slow_only_seconds: float = 0.0
    waiting_seconds: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def add(self, record: RoundRecord, times: RoundTimes) -> None:
        """Add one round."""
        self.round_seconds += times.round_seconds
        waiting = times.waiting_seconds
        of_fast = [waiting[row.worker] for row in record.workers if row.fast and not row.failure]
        self.slow_only_seconds += min(of_fast, default=0.0)
        for row in record.workers:
            self.waiting_seconds[row.fast] += waiting[row.worker]
