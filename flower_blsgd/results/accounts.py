"""Add up the rounds of a run: time, samples, waiting (ALGORITHM section 7)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..algorithm.local_steps import Clock
from ..round_log import RoundRecord, WorkerRound
from .clocks import ClockSums, RoundTimes, device_times, wall_times


@dataclass
class WorkerTotal:
    """One worker's rounds, added up."""

    label: str
    fast: bool
    local_steps: int = 0
    batch_size: int = 0
    completed_steps: int = 0
    num_examples: int = 0
    rounds: int = 0
    failures: int = 0
    weight_sum: float = 0.0
    compute_seconds: float = 0.0
    waiting_seconds: float = 0.0
    transfer_seconds: float = 0.0

    def add(self, row: WorkerRound) -> None:
        """Add one round."""
        self.rounds += 1
        self.local_steps = row.local_steps
        self.completed_steps += row.completed_steps
        if row.completed_steps:
            self.batch_size = row.num_examples // row.completed_steps
        self.num_examples += row.num_examples
        self.failures += bool(row.failure)
        self.weight_sum += row.weight
        self.compute_seconds += row.compute_seconds
        self.waiting_seconds += row.waiting_seconds
        self.transfer_seconds += row.transfer_seconds

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the run, with everything that slowed it; None without a step."""
        return self.compute_seconds / self.completed_steps if self.completed_steps else None


@dataclass
class Accounts:
    """The sums over a run's rounds.

    Parameters
    ----------
    clock : {"wall", "device"}
        Which times tell who waited for whom.

    Attributes
    ----------
    seconds_per_step : mapping of int to float
        By worker index: seconds per step of that worker alone, as far as they are known.
    workers : dict of int to WorkerTotal
        By worker index.
    planning_seconds : float
        Sum over rounds: choosing the samples.
    summing_seconds : float
        Sum over rounds and workers that add up models instead of training.
    wall : ClockSums
        As measured.
    device : ClockSums, optional
        As if each worker had its own device; None as soon as that cannot be computed.
    """

    clock: Clock = "wall"
    seconds_per_step: Mapping[int, float] = field(default_factory=dict)
    workers: dict[int, WorkerTotal] = field(default_factory=dict)
    rounds: int = 0
    samples: int = 0
    planning_seconds: float = 0.0
    summing_seconds: float = 0.0
    wall: ClockSums = field(default_factory=ClockSums)
    device: ClockSums | None = field(default_factory=ClockSums)

    def add(self, record: RoundRecord) -> None:
        """Add one round."""
        self.rounds += 1
        self.planning_seconds += record.planning_seconds
        self.wall.add(record, wall_times(record))
        if self.device is not None:
            times = device_times(record, self.seconds_per_step)
            if times is None:
                self.device = None
            else:
                self.device.add(record, times)
        for row in record.workers:
            self.samples += row.num_examples
            if not row.trained:
                self.summing_seconds += row.summing_seconds
                continue
            total = self.workers.setdefault(row.worker, WorkerTotal(row.label, row.fast))
            total.add(row)

    @property
    def training_seconds(self) -> float:
        """Rounds and planning; neither set-up, evaluation nor checkpoints."""
        return self.wall.round_seconds + self.planning_seconds

    @property
    def device_seconds(self) -> float | None:
        """Computed: the rounds as if each worker had its own device; None if not known."""
        return self.device.round_seconds if self.device is not None and self.rounds else None

    @property
    def budget_seconds(self) -> float:
        """What counts against a budget in seconds: training, on the chosen clock."""
        if self.clock == "device" and self.device_seconds is not None:
            return self.device_seconds
        return self.training_seconds

    def waiting_share(self, fast: bool) -> float | None:
        """Return a tier's waiting / (its workers x sum of round seconds), on the chosen clock.

        None without workers, or if the clock's times are not known.
        """
        workers = sum(total.fast is fast for total in self.workers.values())
        sums = self._on_clock
        if not workers or sums is None or sums.round_seconds == 0:
            return None
        return sums.waiting_seconds[fast] / (workers * sums.round_seconds)

    def longer_for_slow(self) -> float | None:
        """Return by how much waiting for slow workers made the rounds longer, as a share.

        None if the clock's times are not known.
        """
        sums = self._on_clock
        if sums is None or sums.round_seconds == sums.slow_only_seconds:
            return None
        return sums.round_seconds / (sums.round_seconds - sums.slow_only_seconds) - 1

    @property
    def _on_clock(self) -> ClockSums | None:
        return self.device if self.clock == "device" else self.wall

    def sample_share(self, fast: bool) -> float:
        """Return a tier's share of all samples that were trained on."""
        done = sum(t.num_examples for t in self.workers.values() if t.fast is fast)
        return done / self.samples if self.samples else 0.0

    def weight_share(self, fast: bool) -> float:
        """Return a tier's mean weight in the averages."""
        weight = sum(t.weight_sum for t in self.workers.values() if t.fast is fast)
        return weight / self.rounds if self.rounds else 0.0

    def recent(self, record: RoundRecord) -> str:
        """Return who waits for whom in one round, in words; empty if that is not known."""
        times: RoundTimes | None = wall_times(record)
        if self.clock == "device":
            times = device_times(record, self.seconds_per_step)
        if times is None:
            return ""
        waiting = {
            fast: [
                times.waiting_seconds[row.worker]
                for row in record.workers
                if row.trained and row.fast is fast
            ]
            for fast in (True, False)
        }
        shares = {
            fast: sum(seconds) / (len(seconds) * times.round_seconds)
            for fast, seconds in waiting.items()
            if seconds
        }
        names = {True: "fast", False: "slow"}
        return ", ".join(f"{names[fast]} waits {share:.0%}" for fast, share in shares.items())
