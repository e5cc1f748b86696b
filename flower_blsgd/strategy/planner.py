"""Plan epoch after epoch, and cut each into the orders of its rounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flwr.app import ArrayRecord
from flwr.serverapp.exception import AggregationError

from ..algorithm.catalog import TrainOn
from ..algorithm.epoch_plan import (
    EpochMode,
    EpochPlan,
    RoundShape,
    SamplingStats,
    plan_epoch,
    round_shape,
    sampling_stats,
)
from ..algorithm.local_steps import StepPolicy
from ..algorithm.sampling import LossTable, Sampler, derived_seed
from ..algorithm.schedules import LearningRate
from ..errors import UsageError
from ..protocol import TrainOrder
from .workers import Worker


@dataclass(eq=False)
class Planner:
    """Plans epoch after epoch, and cuts each into orders.

    Its parameters are those of `BiasedLocalSGD`; `mode` is its ``epoch``.

    Attributes
    ----------
    table : LossTable
        The recorded losses.
    epoch : int
        The epoch under way, counted from 1; 0 before the first.
    plan : EpochPlan
        Of the epoch under way; there is none before the first.
    sampling_stats : SamplingStats
        Its choice of samples, as it was when it was planned.
    rounds_done : int
        Rounds of this epoch that are over.
    rounds_total : int
        Rounds of all epochs that are over.
    samples_planned, samples_given_up : int
        Of all epochs so far; given up are those of orders that failed.
    budget_share : callable
        Returns the share of the budget that is used up, in [0, 1].
    """

    num_samples: int
    batch_size: int
    step_policy: StepPolicy
    local_steps_fast: int
    sampler: Sampler
    mode: EpochMode
    learning_rate: LearningRate
    momentum_buffers: str
    deadline_seconds: float
    seed: int
    train_on: TrainOn = TrainOn()

    def __post_init__(self) -> None:
        self.table = LossTable(self.num_samples)
        self.epoch = self.rounds_done = self.rounds_total = 0
        self.samples_planned = self.samples_given_up = 0
        self.plan: EpochPlan
        self.sampling_stats: SamplingStats
        self.budget_share: Callable[[], float] = lambda: 0.0
        self._workers: list[Worker] = []
        self._share_at_start = 0.0

    @property
    def epoch_ended(self) -> bool:
        """Whether no round of the epoch is left (true before the first epoch)."""
        return self.epoch == 0 or self.rounds_done == self.plan.rounds

    def orders(
        self,
        server_round: int,
        active: Sequence[Worker],
        arrays: ArrayRecord,
        momentum: ArrayRecord | None,
    ) -> list[tuple[Worker, TrainOrder]]:
        """Return this round's order of each worker that trains; plan an epoch if one is due.

        The samples of planned workers that are gone are given up. If all are gone, a new epoch
        begins with those that are there.

        Raises
        ------
        UsageError
            If the settings do not fit the workers or the data.
        AggregationError
            If there is no worker.
        """
        if self.epoch == 0:
            self.check(active)
        training = self.training(active)
        _refuse_nobody(training)
        present, trains = {w.index for w in active}, {w.index for w in training}
        if not self.epoch_ended and not any(w.index in trains for w in self._workers):
            rounds_left = self.plan.rounds - self.rounds_done
            self.samples_given_up += rounds_left * sum(self.plan.shape.samples_per_round)
            self.rounds_done = self.plan.rounds
        if self.epoch_ended:
            self._plan_next_epoch(server_round, active)
        orders = []
        for rank, worker in enumerate(self._workers):
            order = self._order(server_round, rank, worker, arrays, momentum)
            if worker.index in present:
                orders.append((worker, order))
            else:
                self.samples_given_up += len(order.indices)
        return orders

    def check(self, workers: Sequence[Worker]) -> RoundShape:
        """Return the shape of a round with these workers, if a run can begin with them.

        Raises
        ------
        UsageError
            If a tier that is needed is missing, a speed is not known, or not one step of every
            worker fits into the data.
        AggregationError
            If there is no worker.
        """
        _refuse_nobody(workers)
        _refuse_missing_tier(workers, self.sampler, self.train_on)
        return self._shape(workers)

    def training(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return the workers that train."""
        return [w for w in workers if self.train_on.trains(w.participant(self.batch_size))]

    def _shape(self, workers: Sequence[Worker]) -> RoundShape:
        try:
            return round_shape(
                self.step_policy,
                [worker.participant(self.batch_size) for worker in self.training(workers)],
                len(self.table),
                self.mode,
                self.local_steps_fast,
                len(workers),
            )
        except ValueError as error:
            raise UsageError(str(error)) from None

    def mean_rounds_per_epoch(self, shape: RoundShape) -> float:
        """Return how many rounds an average epoch has: those of the paper's table, or N / S."""
        return shape.table_rounds or len(self.table) / sum(shape.samples_per_round)

    def finish_round(self) -> None:
        """Count the round under way as over."""
        self.rounds_done += 1
        self.rounds_total += 1

    def _plan_next_epoch(self, server_round: int, workers: Sequence[Worker]) -> None:
        training = self.training(workers)
        participants = [worker.participant(self.batch_size) for worker in training]
        plan = self.plan = plan_epoch(
            seed=self.seed,
            epoch=self.epoch + 1,
            participants=participants,
            shape=self._shape(workers),
            sampler=self.sampler,
            table=self.table,
            samples_before=self.samples_planned,
        )
        # Here and not at the epoch's end: the losses that the choice followed change in it.
        rounds_per_epoch = max(1.0, self.rounds_total / max(1, self.epoch))
        self.sampling_stats = sampling_stats(
            plan, participants, self.table, server_round - 1, rounds_per_epoch
        )
        self.epoch += 1
        self.samples_planned += plan.num_planned
        self.rounds_done = 0
        self._workers = training
        self._share_at_start = self.budget_share()

    def _order(
        self,
        server_round: int,
        rank: int,
        worker: Worker,
        arrays: ArrayRecord,
        momentum: ArrayRecord | None,
    ) -> TrainOrder:
        epoch_share = (self.rounds_done + 1) / self.plan.rounds
        rate = self.learning_rate.at(self.epoch, self._share_at_start, epoch_share)
        return TrainOrder(
            round=server_round,
            epoch=self.epoch,
            local_steps=self.plan.shape.local_steps[rank],
            batch_size=self.plan.shape.batch_sizes[rank],
            learning_rate=rate,
            seed=derived_seed(self.seed, "order", server_round, worker.index),
            deadline_seconds=self.deadline_seconds,
            momentum_policy=self.momentum_buffers,
            indices=self.plan.indices(self.rounds_done, rank),
            arrays=arrays,
            momentum=momentum,
        )


def _refuse_nobody(workers: Sequence[Worker]) -> None:
    if not workers:
        raise AggregationError("no worker is left to train; the log above says why")


def _refuse_missing_tier(workers: Sequence[Worker], sampler: Sampler, train_on: TrainOn) -> None:
    """Raise UsageError if a tier is missing that the sampler, or `train_on`, needs."""
    needed = {}
    if train_on.fast_only:
        needed["fast"] = "only fast ones are to train; name one fast"
    elif sampler.needs_both_tiers:
        for tier in ("fast", "slow"):
            way_out = f'name one {tier}, or use sampler = "uniform"'
            needed[tier] = f"this sampler needs a fast and a slow one; {way_out}"
    if train_on.slow_reduce:
        needed["slow"] = 'slow ones are to sum the models; name one slow, or use train-on = "fast"'
    for tier, reason in needed.items():
        if not any(worker.fast is (tier == "fast") for worker in workers):
            present = ", ".join(worker.label for worker in workers)
            raise UsageError(f"workers: no {tier} worker among {present}, and {reason}")
