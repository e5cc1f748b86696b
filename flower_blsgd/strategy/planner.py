"""Plan epoch after epoch, and cut each into the orders of its rounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    with_new_lists,
)
from ..algorithm.local_steps import AutoSteps, Participant, StepPolicy, fastest_worker
from ..algorithm.own_parts import checked_selected
from ..algorithm.sampling import EpochRequest, LossTable, Sampler, derived_seed
from ..algorithm.schedules import LearningRate
from ..algorithm.selection import Selection, SelectionRequest
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
        Its choice of samples, as it was when its lists were made.
    workers : list of Worker
        Those that it was planned for.
    rounds_done : int
        Rounds of this epoch that are over.
    rounds_total : int
        Rounds of all epochs that are over.
    began : int
        Workers that the first epoch was planned for.
    samples_planned : int
        Of all epochs so far, that under way as a whole.
    samples_due : int
        The same before rounding to whole rounds.
    samples_trained, samples_cut_off : int
        Of the rounds that are over: those trained on, and those that a deadline left untrained.
    budget_share : callable
        Returns the share of the budget that is used up, in [0, 1]; called in every round.
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
    selection: Selection | None = None

    def __post_init__(self) -> None:
        self.table = LossTable(self.num_samples)
        self.epoch = self.rounds_done = self.rounds_total = self.began = 0
        self.samples_planned = self.samples_due = 0
        self.samples_trained = self.samples_cut_off = 0
        self.plan: EpochPlan
        self.sampling_stats: SamplingStats
        self.budget_share: Callable[[], float] = lambda: 0.0
        self.workers: list[Worker] = []

    @property
    def epoch_ended(self) -> bool:
        """Whether no round of the epoch is left (true before the first epoch)."""
        return self.epoch == 0 or self.rounds_done == self.plan.rounds

    @property
    def epochs_done(self) -> float:
        """Epochs that are over; of the one under way the share of its rounds."""
        return self.epoch and self.epoch - 1 + self.rounds_done / self.plan.rounds

    def plan_is_due(self, active: Sequence[Worker]) -> bool:
        """Return whether the next orders begin an epoch: the last is over, or its workers left."""
        return self.epoch_ended or not any(worker in active for worker in self.workers)

    def orders(
        self,
        server_round: int,
        active: Sequence[Worker],
        arrays: ArrayRecord,
        momentum: Mapping[int, ArrayRecord],
    ) -> list[tuple[Worker, TrainOrder]]:
        """Return this round's order of each worker that trains; plan an epoch if one is due.

        `momentum` is by worker index what orders bring; nothing for those that are not in it.
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
        if self.plan_is_due(active):
            self._plan_next_epoch(server_round, active)
        elif self.rounds_done == self.plan.lists_end:
            self._make_new_lists(server_round)
        rate = self.learning_rate.at(
            self.epoch, self.budget_share(), self.rounds_done, self.plan.rounds
        )
        shape = self.plan.shape
        return [
            (
                worker,
                TrainOrder(
                    round=server_round,
                    epoch=self.epoch,
                    local_steps=shape.local_steps[rank],
                    batch_size=shape.batch_sizes[rank],
                    learning_rate=rate,
                    seed=derived_seed(self.seed, "order", server_round, worker.index),
                    deadline_seconds=self.deadline_seconds,
                    momentum_policy=self.momentum_buffers,
                    indices=self.plan.indices(self.rounds_done, rank),
                    sample_weights=self.plan.sample_weights(self.rounds_done, rank),
                    arrays=arrays,
                    momentum=momentum.get(worker.index),
                ),
            )
            for rank, worker in enumerate(self.workers)
            if worker in active
        ]

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

    def choose_steps(self, workers: Sequence[Worker], overhead_seconds: float | None) -> None:
        """Choose tau_fast for these workers, if the step policy leaves it to be chosen.

        The overhead is what a round takes except computing; None or 0 if it is not known.
        """
        if isinstance(self.step_policy, AutoSteps):
            training = self.training(workers)
            seconds = [worker.profile.seconds_per_step or None for worker in training]
            sizes = [worker.own_batch(self.batch_size) for worker in training]
            fastest = fastest_worker(seconds, sizes)
            one_step = None if fastest is None else seconds[fastest]
            steps = overhead_seconds / one_step if overhead_seconds and one_step else None
            self.take_steps(self.step_policy.fewest(self._participants(training), steps))

    def take_steps(self, local_steps_fast: int) -> None:
        """Take this tau_fast, if the step policy leaves it to be chosen."""
        if isinstance(self.step_policy, AutoSteps):
            self.step_policy = self.step_policy.policy_of(local_steps_fast)
            self.local_steps_fast = local_steps_fast

    def _shape(self, workers: Sequence[Worker], selected: int | None = None) -> RoundShape:
        """Return the shape of the next epoch's rounds, with so many samples selected for it."""
        try:
            return round_shape(
                self.step_policy,
                self._participants(self.training(workers)),
                len(self.table),
                self.mode,
                self.local_steps_fast,
                len(workers),
                selected or self.num_samples,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _participants(self, training: Sequence[Worker]) -> list[Participant]:
        """Return the workers that train; gamma is relative to the fastest of them."""
        participants = [worker.participant(self.batch_size) for worker in training]
        # By samples per second; with equal batches that is the largest.
        speeds = ((p.speed_ratio or 0.0, p.own_batch) for p in participants)
        fastest = max(((ratio * batch, ratio) for ratio, batch in speeds), default=(0.0, 0.0))[1]
        ratios = [p.speed_ratio and p.speed_ratio / fastest for p in participants]
        return [replace(p, speed_ratio=r) for p, r in zip(participants, ratios, strict=True)]

    def mean_rounds_per_epoch(self, shape: RoundShape) -> float:
        """Return how many rounds an average epoch has: those of the paper's table, or N / S.

        How many samples a selection will leave out is not known.
        """
        return shape.table_rounds or max(1.0, self.num_samples / sum(shape.samples_per_round))

    @property
    def samples_planned_so_far(self) -> int:
        """Those of all rounds that are over: trained on, given up or cut off."""
        if self.epoch == 0:
            return 0
        rounds_left = self.plan.rounds - self.rounds_done
        return self.samples_planned - rounds_left * sum(self.plan.shape.samples_per_round)

    @property
    def samples_given_up(self) -> int:
        """The rest of them: of orders that failed, or of workers that were gone."""
        return self.samples_planned_so_far - self.samples_trained - self.samples_cut_off

    def finish_round(self, trained: int, cut_off: int = 0) -> None:
        """Count the round under way as over, with so many samples trained on, and cut off."""
        self.samples_trained += trained
        self.samples_cut_off += cut_off
        self.rounds_done += 1
        self.rounds_total += 1

    def _plan_next_epoch(self, server_round: int, workers: Sequence[Worker]) -> None:
        training = self.training(workers)
        _refuse_nobody(training)
        participants = self._participants(training)
        epoch, share = self.epoch + 1, self.budget_share()
        selected = None
        rounds_per_epoch = max(1.0, self.rounds_total / max(1, self.epoch))
        if self.selection is not None:
            request = SelectionRequest(self.seed, epoch, share)
            chosen = self.selection.select(request, self.table)
            selected = checked_selected(self.selection, chosen, self.num_samples)
        size = self.num_samples if selected is None else len(selected.indices)
        goes_on = self.epoch_ended and training == self.workers
        self.samples_due += size
        plan = self.plan = plan_epoch(
            seed=self.seed,
            epoch=epoch,
            participants=participants,
            shape=self._shape(workers, size),
            sampler=self.sampler,
            table=self.table,
            samples_before=self.samples_planned,
            samples_due=self.samples_due,
            selected=selected,
            last=self.plan if goes_on else None,
        )
        if not plan.first_round:  # else its lists are those of before
            # Here and not at the epoch's end: the losses that the choice followed change in it.
            self.sampling_stats = sampling_stats(
                plan, participants, self.table, server_round - 1, rounds_per_epoch
            )
        self.began = self.began or len(training)
        self.epoch += 1
        self.samples_planned += plan.num_planned
        self.rounds_done = 0
        self.workers = training

    def _make_new_lists(self, server_round: int) -> None:
        """Let the sampler choose again within an epoch, for the same workers."""
        plan, workers = self.plan, tuple(self._participants(self.workers))
        before, per_round = self.samples_planned_so_far, plan.shape.samples_per_round
        request = EpochRequest(self.seed, self.epoch, plan.rounds, workers, per_round, before)
        self.plan = with_new_lists(plan, self.sampler, request, self.table, self.rounds_done)
        self.sampling_stats = sampling_stats(
            self.plan, workers, self.table, server_round - 1, plan.rounds
        )


def _refuse_nobody(workers: Sequence[Worker]) -> None:
    if not workers:
        raise AggregationError("no worker is left to train; the log above says why")


def _refuse_missing_tier(workers: Sequence[Worker], sampler: Sampler, train_on: TrainOn) -> None:
    """Raise UsageError if a tier is missing that the sampler, or `train_on`, needs."""
    needed = {}
    if train_on.fast_only:
        needed["fast"] = "only fast ones are to train; name one fast"
    elif sampler.needs_both_tiers and not any(_may_be_slow(worker) for worker in workers):
        for tier in ("fast", "slow"):
            way_out = f'name one {tier}, or use sampler = "uniform"'
            needed[tier] = f"this sampler needs a fast and a slow one; {way_out}"
    if train_on.slow_reduce:
        needed["slow"] = 'slow ones are to sum the models; name one slow, or use train-on = "fast"'
    for tier, reason in needed.items():
        if not any(worker.fast is (tier == "fast") for worker in workers):
            present = ", ".join(worker.label for worker in workers)
            raise UsageError(f"workers: no {tier} worker among {present}, and {reason}")


def _may_be_slow(worker: Worker) -> bool:
    """Return whether a worker counts as fast only because nothing is known of it."""
    return not worker.profile.tier and worker.speed_ratio is None
