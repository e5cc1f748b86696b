"""Sum up the rounds of a run: time on two clocks, samples, waiting (ALGORITHM section 7)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..algorithm.local_steps import Clock
from ..strategy.round_metrics import RoundRecord, WorkerRound


@dataclass(frozen=True)
class RoundTimes:
    """How long a round took on one clock.

    Attributes
    ----------
    round_seconds : float
        The whole round.
    waiting_seconds : mapping of int to float
        By worker index: the last worker's end of computing minus the own one; 0 for a worker
        that did not compute.
    """

    round_seconds: float
    waiting_seconds: Mapping[int, float]


def device_times(record: RoundRecord, seconds_per_step: Mapping[int, float]) -> RoundTimes | None:
    """Return a round's times as if each worker had its own device.

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

    >>> from ..strategy.round_metrics import WorkerRound
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


class RunMetrics:
    """The rounds of a run, and what they sum up to.

    Parameters
    ----------
    clock : {"wall", "device"} (default: "wall")
        Which times decide how long workers waited and how much of a budget is used up.

    Attributes
    ----------
    seconds_per_step : mapping of int to float
        By worker index: seconds per step of that worker alone, as far as they are known. It may
        be replaced before each round.
    records : list of RoundRecord
        All rounds.
    by_worker : dict of int to list of WorkerRound
        By worker index: the rounds of those that train.
    samples : int
        That were trained on.
    training_seconds : float
        Rounds and planning as measured, without set-up, evaluation and checkpoints.
    budget_seconds, last_budget_seconds : float
        What all rounds, and the last one, count against a budget in seconds. On the wall clock
        planning and rounds as measured; on the device clock the rounds as if each worker had its
        own device, up to the first for which that is not known.
    """

    def __init__(self, clock: Clock = "wall") -> None:
        self.clock = clock
        self.seconds_per_step: Mapping[int, float] = {}
        self.records: list[RoundRecord] = []
        self.by_worker: dict[int, list[WorkerRound]] = {}
        self.samples = 0
        self.training_seconds = 0.0
        self.budget_seconds = 0.0
        self.last_budget_seconds = 0.0
        self._times: list[RoundTimes | None] = []
        self._device_seconds: float | None = 0.0

    def add(self, record: RoundRecord) -> None:
        """Add one round."""
        waiting = {row.worker: row.waiting_seconds for row in record.workers}
        measured = RoundTimes(record.round_seconds, waiting)
        computed = device_times(record, self.seconds_per_step)
        self.records.append(record)
        self._times.append(computed if self.clock == "device" else measured)
        seconds = record.planning_seconds + record.round_seconds
        self.training_seconds += seconds
        if computed is None:
            self._device_seconds = None
        elif self._device_seconds is not None:
            self._device_seconds += computed.round_seconds
            if self.clock == "device":
                seconds = computed.round_seconds
        self.last_budget_seconds = seconds
        self.budget_seconds += seconds
        for row in record.workers:
            self.samples += row.num_examples
            if row.trained:
                self.by_worker.setdefault(row.worker, []).append(row)

    @property
    def last_times(self) -> RoundTimes | None:
        """Of the last round, on the chosen clock; None if they are not known."""
        return self._times[-1]

    @property
    def device_seconds(self) -> float | None:
        """Computed: the rounds as if each worker had its own device; None if not known."""
        return self._device_seconds if self.records else None

    @property
    def summing_seconds(self) -> float:
        """Sum over rounds and workers that sum up models instead of training."""
        return sum(row.summing_seconds for record in self.records for row in record.workers)

    def waiting_share(self, fast: bool) -> float | None:
        """Return a tier's waiting / (its workers x sum of round seconds), on the chosen clock.

        None without workers, or if the clock's times are not known.
        """
        times, workers = self._known_times(), list(self._of_tier(fast))
        if times is None or not workers:
            return None
        waited = sum(
            round_times.waiting_seconds[row.worker]
            for record, round_times in zip(self.records, times, strict=True)
            for row in record.workers
            if row.fast is fast
        )
        return waited / (len(workers) * sum(one.round_seconds for one in times))

    def longer_for_slow(self) -> float | None:
        """Return by how much waiting for slow workers made the rounds longer, as a share.

        Without them a round would have ended with the last fast worker. None if the clock's times
        are not known.
        """
        times = self._known_times()
        if times is None:
            return None
        whole = without_slow = 0.0
        for record, round_times in zip(self.records, times, strict=True):
            of_fast = [
                round_times.waiting_seconds[row.worker]
                for row in record.workers
                if row.fast and not row.failure
            ]
            whole += round_times.round_seconds
            without_slow += round_times.round_seconds - min(of_fast, default=0.0)
        return whole / without_slow - 1 if without_slow else None

    def sample_share(self, fast: bool) -> float:
        """Return a tier's share of all samples that were trained on."""
        done = sum(row.num_examples for rows in self._of_tier(fast) for row in rows)
        return done / self.samples if self.samples else 0.0

    def weight_share(self, fast: bool) -> float:
        """Return a tier's mean weight in the averages."""
        weight = sum(row.weight for rows in self._of_tier(fast) for row in rows)
        return weight / len(self.records) if self.records else 0.0

    def _of_tier(self, fast: bool) -> Iterator[list[WorkerRound]]:
        return (rows for rows in self.by_worker.values() if rows[0].fast is fast)

    def _known_times(self) -> list[RoundTimes] | None:
        known = [times for times in self._times if times is not None]
        return known if len(known) == len(self._times) else None
