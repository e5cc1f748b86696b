"""Plan epoch after epoch, and cut each into the orders of its rounds."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flwr.app import ArrayRecord
from flwr.serverapp.exception import AggregationError

from ..algorithm.catalog import TrainOn
from ..algorithm.epoch_plan import (
    EpochMode,
    EpochPlan,
    RoundShape,
    plan_epoch,
    round_shape,
)
from ..algorithm.local_steps import Participant, StepPolicy
from ..algorithm.randomness import derived_seed
from ..algorithm.sampling import LossTable, Sampler
from ..algorithm.schedules import LearningRate
from ..algorithm.statistics import SamplingStats, sampling_stats
from ..errors import UsageError
from ..protocol import TrainOrder
from .workers import Worker

_LOG = logging.getLogger(__name__)

_TIERS = ((True, "fast"), (False, "slow"))


@dataclass(frozen=True)
class OrderSettings:
    """What all orders of a run have in common."""

    learning_rate: LearningRate
    momentum_policy: str
    deadline_seconds: float
    seed: int


class Planner:
    """Plans epoch after epoch, and cuts each into orders.

    Its parameters are those of `BiasedLocalSGD`; `mode` is its ``epoch``.

    Attributes
    ----------
    table : LossTable
        The recorded losses.
    epoch : int
        The epoch under way, counted from 1; 0 before the first.
    rounds_done : int
        Rounds of this epoch that are over.
    rounds_total : int
        Rounds of all epochs that are over.
    samples_planned, samples_given_up : int
        Of all epochs so far; given up are those of orders that failed.
    budget_share : callable
        Returns the share of the budget that is used up, in [0, 1].
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        step_policy: StepPolicy,
        local_steps_fast: int,
        sampler: Sampler,
        mode: EpochMode,
        settings: OrderSettings,
        train_on: TrainOn | None = None,
    ) -> None:
        self.table = LossTable(num_samples)
        self.batch_size = batch_size
        self.step_policy = step_policy
        self.sampler = sampler
        self.train_on = train_on or TrainOn()
        self.epoch = 0
        self.rounds_done = 0
        self.rounds_total = 0
        self.samples_planned = 0
        self.samples_given_up = 0
        self.budget_share: Callable[[], float] = lambda: 0.0
        self._local_steps_fast = local_steps_fast
        self._mode: EpochMode = mode
        self._settings = settings
        self._plan: EpochPlan | None = None
        self._sampling_stats: SamplingStats | None = None
        self._workers: list[Worker] = []
        self._share_at_start = 0.0
        self._tiers_seen: set[str] = set()

    @property
    def plan(self) -> EpochPlan:
        """The plan of the epoch under way."""
        assert self._plan is not None, "no epoch has been planned yet"
        return self._plan

    @property
    def sampling_stats(self) -> SamplingStats:
        """The choice of samples of the epoch under way, as it was when the epoch was planned."""
        assert self._sampling_stats is not None, "no epoch has been planned yet"
        return self._sampling_stats

    @property
    def epoch_ended(self) -> bool:
        """Whether no round of the epoch is left (true before the first epoch)."""
        return self._plan is None or self.rounds_done == self._plan.rounds

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
        self._warn_of_lost_tiers(active)
        if self.epoch == 0:
            self.check(active)
        training = self.training(active)
        _refuse_nobody(training)
        present, trains = {w.index for w in active}, {w.index for w in training}
        if not self.epoch_ended and not any(w.index in trains for w in self._workers):
            rounds_left = self.plan.rounds - self.rounds_done
            self.samples_given_up += rounds_left * sum(self.plan.shape.samples_per_round)
            self._plan = None
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
            If a tier that is needed is missing, the step policy refuses these workers, or not
            one step of every worker fits into the data.
        AggregationError
            If there is no worker.
        """
        _refuse_nobody(workers)
        _refuse_missing_tier(workers, self.sampler, self.train_on)
        participants = [w.participant(self.batch_size) for w in self.training(workers)]
        try:
            self.step_policy.check(participants)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return self._shape(participants, len(workers))

    def training(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return those of these workers that train."""
        return [w for w in workers if self.train_on.trains(w.participant(self.batch_size))]

    def _shape(self, participants: Sequence[Participant], num_workers: int) -> RoundShape:
        try:
            return round_shape(
                self.step_policy,
                participants,
                len(self.table),
                self._mode,
                self._local_steps_fast,
                num_workers,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None

    def mean_rounds_per_epoch(self, shape: RoundShape) -> float:
        """Return how many rounds of this shape an average epoch has."""
        return shape.mean_rounds_per_epoch(len(self.table))

    def _warn_of_lost_tiers(self, active: Sequence[Worker]) -> None:
        """Warn, once, when the last worker of a tier is gone."""
        for fast, tier in _TIERS:
            present = any(worker.fast is fast for worker in active)
            if tier in self._tiers_seen and not present:
                self._tiers_seen.discard(tier)
                _LOG.warning("the last %s worker is gone; the run goes on without", tier)
            elif present:
                self._tiers_seen.add(tier)

    def finish_round(self) -> None:
        """Count the round under way as over."""
        self.rounds_done += 1
        self.rounds_total += 1

    def _plan_next_epoch(self, server_round: int, workers: Sequence[Worker]) -> None:
        training = self.training(workers)
        participants = [worker.participant(self.batch_size) for worker in training]
        plan = self._plan = plan_epoch(
            seed=self._settings.seed,
            epoch=self.epoch + 1,
            participants=participants,
            shape=self._shape(participants, len(workers)),
            sampler=self.sampler,
            table=self.table,
            samples_before=self.samples_planned,
        )
        # Here and not at the epoch's end: the losses that the choice followed change in it.
        rounds_per_epoch = max(1.0, self.rounds_total / max(1, self.epoch))
        self._sampling_stats = sampling_stats(
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
        rate = self._settings.learning_rate.at(self.epoch, self._share_at_start, epoch_share)
        return TrainOrder(
            round=server_round,
            epoch=self.epoch,
            local_steps=self.plan.shape.local_steps[rank],
            batch_size=self.plan.shape.batch_sizes[rank],
            learning_rate=rate,
            seed=derived_seed(self._settings.seed, "order", server_round, worker.index),
            deadline_seconds=self._settings.deadline_seconds,
            momentum_policy=self._settings.momentum_policy,
            indices=self.plan.indices(self.rounds_done, rank),
            arrays=arrays,
            momentum=momentum,
        )


def _refuse_nobody(workers: Sequence[Worker]) -> None:
    if not workers:
        raise AggregationError("no worker is left to train; the log above says why")


def _refuse_missing_tier(workers: Sequence[Worker], sampler: Sampler, train_on: TrainOn) -> None:
    """Raise UsageError if a tier is missing that the sampler, or `train_on`, needs."""
    for fast, tier in _TIERS:
        needed_by = _needed_by(fast, sampler, train_on)
        if needed_by and not any(worker.fast is fast for worker in workers):
            present = ", ".join(worker.label for worker in workers)
            raise UsageError(f"workers: no {tier} worker among {present}, and {needed_by}")


def _needed_by(fast: bool, sampler: Sampler, train_on: TrainOn) -> str:
    """Return what needs a worker of a tier, and the way out; empty if nothing does."""
    slow_trains = train_on.trains(Participant(fast=False, batch_size=1))
    if fast and not slow_trains:
        return "only fast ones are to train; name one fast"
    if not fast and train_on.slow_reduce:
        return 'slow ones are to sum the models; name one slow, or use train-on = "fast"'
    if sampler.needs_both_tiers and slow_trains:
        return (
            "this sampler needs a fast and a slow one; "
            f'name one {"fast" if fast else "slow"}, or use sampler = "uniform"'
        )
    return ""
