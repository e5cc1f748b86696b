"""Plan the epochs and their rounds, and record the results of the rounds."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
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
from ..algorithm.local_steps import Participant, StepPolicy, SystemAwareSteps, fewest_steps
from ..algorithm.loss_table import LossTable
from ..algorithm.randomness import derived_seed
from ..algorithm.sampling import SampleList, Sampler
from ..algorithm.sampling_stats import SamplingStats, sampling_stats
from ..algorithm.schedules import LearningRate
from ..algorithm.selection import Selected, Selection, SelectionRequest
from ..algorithm.validation import checked_selected
from ..errors import UsageError
from ..fields import from_record, to_record
from ..flower.array_records import tensors_of, view_record
from ..protocol import Keys, TrainOrder
from .budget import Budget
from .round import Outcome, Round
from .workers import Worker

_LOG = logging.getLogger(__name__)

_COUNTERS = (
    *("epoch", "rounds_done", "rounds_total", "began"),
    *("samples_planned", "samples_due", "samples_trained", "samples_cut_off"),
    *("rounds_before", "share_before"),
)

_MEASURED_SECONDS = 0.3
"""Longest computing in a round that measures speeds, unless one step takes longer."""


@dataclass(eq=False)
class Planner:
    """Plan of the epochs and rounds, and the progress of the run.

    The parameters are those of `BiasedLocalSGD`; `mode` is its ``epoch``, and `keys` are the names
    of records in messages. Only `record` writes the losses in `table`. Before the first epoch,
    `epoch` is 0, and `plan` and its `sampling_stats` are unset. Further attributes:

    - `workers`: those of the plan; `began`: their number in the first epoch.
    - `rounds_done`, `rounds_total`: completed rounds of this epoch, and of all epochs.
    - `samples_planned`, `samples_due`: samples of all epochs, including the whole current one:
      after rounding to whole rounds, and before.
    - `samples_trained`, `samples_cut_off`: samples of completed rounds: trained on, and skipped
      because of a deadline.
    - `averaged_momentum`: sent with every order of the next round; for the policy ``"average"``.
    - `resumed_momentum`: sent to each worker, by index, after a resume until an order succeeds; for
      the policy ``"keep"``.
    - `measures_in_rounds`: whether rounds of training measure unknown speeds, as for scripts.
    - `measured`: seconds per step by worker index, as far as known, while rounds measure speeds;
      else None. The rest of the epoch is planned again after each of these rounds.
    - `rounds_before`, `share_before`: of this epoch, when the number of its rounds changed.
    - `budget`: of the run, which schedules follow; `seconds`: those that are used of it.
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
    keys: Keys = Keys()

    def __post_init__(self) -> None:
        self.table = LossTable(self.num_samples)
        self.epoch = self.rounds_done = self.rounds_total = self.began = 0
        self.samples_planned = self.samples_due = 0
        self.samples_trained = self.samples_cut_off = 0
        self.averaged_momentum: ArrayRecord | None = None
        self.resumed_momentum: dict[int, ArrayRecord] = {}
        self.measured: dict[int, float] | None = None
        self.measures_in_rounds = False
        self.rounds_before, self.share_before = 0, 0.0
        self.plan: EpochPlan
        self.sampling_stats: SamplingStats
        self.budget, self.seconds = Budget(), 0.0
        self.workers: list[Worker] = []
        self._without_room: set[int] = set()

    @property
    def epoch_ended(self) -> bool:
        """Whether the epoch has no rounds left; True before the first epoch."""
        return self.epoch == 0 or self.rounds_done == self.plan.rounds

    @property
    def epochs_done(self) -> float:
        """Number of completed epochs, including the completed share of the current one."""
        return self.epoch and self.epoch - 1 + self._share_done

    @property
    def _share_done(self) -> float:
        done, rounds = self.rounds_done - self.rounds_before, self.plan.rounds - self.rounds_before
        return self.share_before + (1 - self.share_before) * (done / rounds)

    @property
    def used(self) -> Budget:
        """Used part of the budget."""
        return Budget(self.epochs_done, self.seconds, self.rounds_total, self.samples_trained)

    @property
    def budget_share(self) -> float:
        """Used share of the budget; 1 or more at its end."""
        return self.budget.share(self.used)

    def plan_is_due(self, active: Sequence[Worker]) -> bool:
        """Return whether the next round begins an epoch: the last one ended or lost its workers."""
        return self.epoch_ended or not any(worker in active for worker in self.workers)

    def next_round(self, server_round: int, active: Sequence[Worker], arrays: ArrayRecord) -> Round:
        """Return the next round, with an order for each worker that trains.

        Plans an epoch if one is due. If a planned worker is gone, its samples are skipped. The
        active workers are those that can get an order, in worker order. UsageError if the settings
        do not fit the workers or the data; AggregationError without a worker.
        """
        if self.epoch == 0:
            self.check(active)
        if self.plan_is_due(active):
            self._plan(server_round, active)
        elif self.measured is not None or self.rounds_done == self.plan.lists_end:
            others = [worker for worker in active if worker not in self.training(active)]
            self._plan(server_round, [*self.workers, *others], is_rest=True)
        rate = self.learning_rate.at(
            self.epoch, self.budget_share, self.rounds_done, self.plan.rounds
        )
        orders = [
            (worker, self._order(server_round, rank, worker, rate, arrays))
            for rank, worker in enumerate(self.workers)
            if worker in active
        ]
        position = self.epoch, self.rounds_done + 1, self.plan.rounds
        return Round(orders, arrays, self.keys, self.batch_size, *position)

    def _order(
        self, server_round: int, rank: int, worker: Worker, rate: float, arrays: ArrayRecord
    ) -> TrainOrder:
        shape, per_round = self.plan.shape, self.plan.shape.samples_per_round
        in_stream = self.sampler.is_stream and self.selection is None
        return TrainOrder(
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
            momentum=self.averaged_momentum or self.resumed_momentum.get(worker.index),
            progress=min(1.0, self.budget_share),
            stream_start=self.samples_planned_so_far + sum(per_round[:rank]) if in_stream else 0,
            stream_stride=sum(per_round) if in_stream else 0,
        )

    def record(self, outcomes: Sequence[Outcome], momentum: ArrayRecord | None = None) -> None:
        """Record the losses, the progress and the workers' times of a round.

        The outcomes are in worker order. If two workers trained on one sample, the loss of the
        first is kept. `momentum` is the average for the next round.
        """
        for outcome in reversed(outcomes):
            report, order = outcome.report, outcome.order
            if report is None:
                self.table.record_failure(order.indices)
                continue
            self.table.record(order.indices[: len(report.losses)], report.losses, order.round)
            self.resumed_momentum.pop(outcome.worker.index, None)
            if report.num_examples and report.compute_seconds > 0 and not report.traced:
                outcome.worker.note_time(
                    report.compute_seconds,
                    report.num_examples,
                    self.batch_size,
                    per_epoch=self.step_policy.follows_speeds,
                )
        self.samples_trained += int(sum(outcome.load for outcome in outcomes))
        self.samples_cut_off += sum(outcome.cut_off for outcome in outcomes)
        self.rounds_done += 1
        self.rounds_total += 1
        if momentum is not None:
            self.averaged_momentum = momentum

    def check(self, workers: Sequence[Worker]) -> RoundShape:
        """Check that a run can begin with these workers, and return the shape of its rounds.

        With an open step policy it is the shape of the shortest rounds. UsageError if a required
        tier is missing, or not even one step of every worker fits into the data; AggregationError
        without a worker.
        """
        _refuse_nobody(workers)
        _refuse_missing_tier(workers, self.sampler, self.train_on, self.batch_size)
        policy, steps = self.step_policy, self.local_steps_fast
        if policy.is_open:
            steps = fewest_steps(policy, self.participants(self.training(workers)), 0.0)
        return self.shape(workers, steps)

    def training(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return the workers that train."""
        return [worker for worker in workers if worker.fast or not self.train_on.fast_only]

    def fewest_steps(self, workers: Sequence[Worker], overhead_seconds: float | None) -> int:
        """Return the best tau_fast of an open step policy; else the tau_fast of the run.

        `overhead_seconds` is the duration of a round without computing; None or 0 if unknown.
        """
        if not self.step_policy.is_open:
            return self.local_steps_fast
        training, overhead_steps = self.training(workers), None
        by_speed = sorted(training, key=lambda w: w.samples_per_second(self.batch_size))
        if overhead_seconds and by_speed and by_speed[-1].profile.seconds_per_step:
            overhead_steps = overhead_seconds / by_speed[-1].profile.seconds_per_step
        return fewest_steps(self.step_policy, self.participants(training), overhead_steps)

    def take_steps(self, local_steps_fast: int) -> None:
        """Set the tau_fast of an open step policy."""
        if self.step_policy.is_open:
            self.step_policy = self.step_policy.with_local_steps(local_steps_fast)
            self.local_steps_fast = local_steps_fast

    def shape(
        self, workers: Sequence[Worker], local_steps_fast: int, selected: int | None = None
    ) -> RoundShape:
        """Return the shape of a round with this tau_fast.

        `selected` is the number of samples of the epoch; by default all. UsageError if not even one
        step of every worker fits into the data.
        """
        policy = self.step_policy.with_local_steps(local_steps_fast)
        participants = self.participants(self.training(workers))
        if self.measured is not None and policy.with_local_steps(1).needs_speeds:
            known = [
                self.measured.get(worker.index) or worker.profile.seconds_per_step
                for worker in self.training(workers)
            ]
            most = min([_MEASURED_SECONDS, *(local_steps_fast * s for s in known if s)])
            policy = SystemAwareSteps(local_steps_fast)
            participants = [  # a worker with an unknown speed takes one step
                replace(p, given_steps=p.given_steps or (max(1, round(most / s)) if s else 1))
                for p, s in zip(participants, known, strict=True)
            ]
        try:
            return round_shape(
                policy,
                participants,
                len(self.table),
                self.mode,
                local_steps_fast,
                len(workers),
                selected or self.num_samples,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None

    def participants(self, training: Sequence[Worker]) -> list[Participant]:
        """Return the workers as step policies see them; gamma is relative to the fastest one."""
        participants = [worker.participant(self.batch_size) for worker in training]
        # The fastest by samples per second; with equal batches the largest gamma.
        speeds = ((p.speed_ratio or 0.0, p.own_batch) for p in participants)
        fastest = max(((ratio * batch, ratio) for ratio, batch in speeds), default=(0.0, 0.0))[1]
        ratios = [p.speed_ratio and p.speed_ratio / fastest for p in participants]
        return [replace(p, speed_ratio=r) for p, r in zip(participants, ratios, strict=True)]

    def computing_seconds(self, training: Sequence[Worker], shape: RoundShape) -> list[float]:
        """Return how long each training worker computes in a round; 0 if its speed is unknown."""
        return [
            count / worker.own_batch(self.batch_size) * worker.profile.seconds_per_step
            for count, worker in zip(shape.samples_per_round, training, strict=True)
        ]

    @property
    def samples_planned_so_far(self) -> int:
        """Samples of all completed rounds: trained on, skipped or cut off."""
        if self.epoch == 0:
            return 0
        rounds_left = self.plan.rounds - self.rounds_done
        return self.samples_planned - rounds_left * sum(self.plan.shape.samples_per_round)

    @property
    def samples_given_up(self) -> int:
        """Skipped samples: those of failed orders, and of workers that were gone."""
        return self.samples_planned_so_far - self.samples_trained - self.samples_cut_off

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for a checkpoint after at least one round."""
        plan = self.plan
        return {
            "counters": {name: getattr(self, name) for name in _COUNTERS},
            "local-steps-fast": 0 if self.step_policy.is_open else self.local_steps_fast,
            "table": self.table.state_dict(),
            "stats": {n: np.asarray(v) for n, v in asdict(self.sampling_stats).items()},
            "planned-for": [worker.index for worker in self.workers],
            "averaged-momentum": self.averaged_momentum
            and dict(tensors_of(self.averaged_momentum)),
            "plan": {
                "epoch": plan.epoch,
                "rounds": plan.rounds,
                "first-round": plan.first_round,
                "shape": to_record(plan.shape),
                "members": [list(each.members) for each in plan.sample_lists],
                "lists": [each.indices for each in plan.sample_lists],
                "weights": plan.weights,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], workers: Sequence[Worker]) -> None:
        """Restore the state, given the registry's workers; ValueError if it does not fit."""
        counters = {"rounds_before": 0, "share_before": 0.0} | state["counters"]  # 0.1.0 has none
        if counters.keys() != set(_COUNTERS):
            raise ValueError("its counters belong to another version")
        self.table.load_state_dict(state["table"])
        for name, value in counters.items():
            setattr(self, name, value)
        if state["local-steps-fast"]:
            self.take_steps(state["local-steps-fast"])
        self.sampling_stats = SamplingStats(**{n: v.item() for n, v in state["stats"].items()})
        self.workers = [workers[index] for index in state["planned-for"]]
        averaged, plan = state["averaged-momentum"], state["plan"]
        self.averaged_momentum = averaged and view_record(averaged)
        fields = from_record(RoundShape, plan["shape"]).items()
        shape: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in fields}
        pairs = zip(plan["lists"], plan["members"], strict=True)
        lists = tuple(SampleList(indices, tuple(members)) for indices, members in pairs)
        position = plan["epoch"], plan["rounds"], RoundShape(**shape)
        self.plan = EpochPlan(*position, lists, plan["weights"], plan["first-round"])

    def _plan(self, server_round: int, workers: Sequence[Worker], is_rest: bool = False) -> None:
        """Plan the next epoch, or the rest of the current one."""
        _refuse_nobody(self.training(workers))
        workers = self._those_that_fit(workers)
        training = self.training(workers)
        rounds_per_epoch = max(1.0, self.rounds_total / (self.epochs_done or 1))
        epoch, done, share, selected = self.epoch + 1, 0, 0.0, None
        if is_rest:
            epoch, done, share = self.epoch, self.rounds_done, self._share_done
            self.samples_planned = self.samples_planned_so_far
        if self.selection is not None:
            request = SelectionRequest(self.seed, epoch, self.budget_share)
            chosen = self.selection.select(request, self.table)
            selected = checked_selected(self.selection, chosen, self.num_samples)
        size = self.num_samples if selected is None else len(selected.indices)
        if not is_rest:
            self.samples_due += size
        shape = self.shape(workers, self.local_steps_fast, size)
        plan = self.plan_lists(epoch, shape, training, done, selected)
        if plan.first_round == done:  # new lists; now, because the epoch changes the losses
            self.sampling_stats = sampling_stats(
                plan, self.participants(training), self.table, server_round - 1, rounds_per_epoch
            )
        self.began = self.began or len(training)
        if not is_rest or plan.rounds != self.plan.rounds:
            self.rounds_before, self.share_before = done, share
        self.plan, self.epoch, self.rounds_done, self.workers = plan, epoch, done, training
        self.samples_planned += (plan.rounds - done) * sum(plan.shape.samples_per_round)

    def plan_lists(
        self,
        epoch: int,
        shape: RoundShape,
        training: Sequence[Worker],
        rounds_before: int,
        selected: Selected | None,
    ) -> EpochPlan:
        """Return the plan of an epoch, or of its rest after `rounds_before`."""
        seed = self.seed
        if rounds_before and (selected or not self.sampler.is_stream):
            seed = derived_seed(seed, "rest-of-epoch", rounds_before)  # not the first samples again
        return plan_epoch(
            seed=seed,
            epoch=epoch,
            participants=self.participants(training),
            shape=shape,
            sampler=self.sampler,
            table=self.table,
            samples_before=self.samples_planned,
            samples_due=self.samples_due,
            selected=selected,
            rounds_before=rounds_before,
            listed_rounds=1 if self.measured is not None else None,
        )

    def _those_that_fit(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Leave out workers that joined late if one step of all does not fit into the data."""
        while self.epoch and len(self.training(workers)) > 1:
            try:
                self.shape(workers, self.local_steps_fast)
                break
            except UsageError as error:
                *workers, late = workers
                if late.index not in self._without_room:
                    self._without_room.add(late.index)
                    what = "%s is left out of epoch %d: %s"
                    _LOG.warning(what, late.label, self.epoch + 1, error)
        return workers


def _refuse_nobody(workers: Sequence[Worker]) -> None:
    if not workers:
        raise AggregationError("no worker is left to train; see the log above")


def _refuse_missing_tier(
    workers: Sequence[Worker], sampler: Sampler, train_on: TrainOn, batch_size: int
) -> None:
    """Raise UsageError if the sampler or `train_on` needs a tier that is missing."""
    needed, several = {}, len(workers) > 1
    by_speed = sorted(workers, key=lambda w: -w.samples_per_second(batch_size))
    name_fast = f"name {by_speed[0].label if several else 'one'} fast"
    name_slow = f"name {by_speed[-1].label if several else 'one'} slow"
    # An unnamed worker with an unknown speed may turn out to be slow.
    unknown = any(not w.profile.tier and w.speed_ratio is None for w in workers)
    if train_on.fast_only:
        needed["fast"] = f"only fast workers train; {name_fast}"
    elif sampler.needs_both_tiers and not unknown:
        both = "this sampler needs a fast and a slow one"
        for tier, fix in (("fast", name_fast), ("slow", name_slow)):
            needed[tier] = f'{both}; {fix}, or use sampler = "uniform"'
    if train_on.slow_reduce:
        needed["slow"] = f'slow workers sum the models; {name_slow}, or use train-on = "fast"'
    for tier, reason in needed.items():
        if not any(worker.fast is (tier == "fast") for worker in workers):
            present = ", ".join(worker.label for worker in workers)
            raise UsageError(f"workers: no {tier} worker among {present}, and {reason}")
