"""Add up the rounds of a run: time, samples, waiting (ALGORITHM section 7)."""

from dataclasses import dataclass, field

from ..round_log import RoundRecord, WorkerRound


@dataclass
class WorkerTotal:
    """One worker's rounds, added up."""

    label: str
    fast: bool
    local_steps: int = 0
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

    Attributes
    ----------
    workers : dict of int to WorkerTotal
        By worker index.
    round_seconds : float
        Sum over rounds: first order sent to new global model ready.
    planning_seconds : float
        Sum over rounds: choosing the samples.
    slow_only_seconds : float
        How much shorter the rounds would have been had they ended with the last fast worker.
    """

    workers: dict[int, WorkerTotal] = field(default_factory=dict)
    rounds: int = 0
    samples: int = 0
    round_seconds: float = 0.0
    planning_seconds: float = 0.0
    slow_only_seconds: float = 0.0

    def add(self, record: RoundRecord) -> None:
        """Add one round."""
        self.rounds += 1
        self.round_seconds += record.round_seconds
        self.planning_seconds += record.planning_seconds
        fast_waiting = [r.waiting_seconds for r in record.workers if r.fast and not r.failure]
        self.slow_only_seconds += min(fast_waiting, default=0.0)
        for row in record.workers:
            self.samples += row.num_examples
            total = self.workers.setdefault(row.worker, WorkerTotal(row.label, row.fast))
            total.add(row)

    @property
    def training_seconds(self) -> float:
        """Rounds and planning; neither set-up, evaluation nor checkpoints."""
        return self.round_seconds + self.planning_seconds

    def waiting_share(self, fast: bool) -> float | None:
        """Return a tier's waiting / (its workers x sum of round seconds); None without workers."""
        tier = [total for total in self.workers.values() if total.fast is fast]
        if not tier or self.round_seconds == 0:
            return None
        waiting = sum(total.waiting_seconds for total in tier)
        return waiting / (len(tier) * self.round_seconds)

    def sample_share(self, fast: bool) -> float:
        """Return a tier's share of all samples that were trained on."""
        done = sum(t.num_examples for t in self.workers.values() if t.fast is fast)
        return done / self.samples if self.samples else 0.0

    def weight_share(self, fast: bool) -> float:
        """Return a tier's mean weight in the averages."""
        weight = sum(t.weight_sum for t in self.workers.values() if t.fast is fast)
        return weight / self.rounds if self.rounds else 0.0

    def recent(self, record: RoundRecord) -> str:
        """Return who waits for whom in one round, in words."""
        waiting = {
            fast: [row.waiting_seconds for row in record.workers if row.fast is fast]
            for fast in (True, False)
        }
        shares = {
            fast: sum(seconds) / (len(seconds) * record.round_seconds)
            for fast, seconds in waiting.items()
            if seconds
        }
        names = {True: "fast", False: "slow"}
        return ", ".join(f"{names[fast]} waits {share:.0%}" for fast, share in shares.items())
