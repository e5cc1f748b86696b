"""Plan the epochs and their rounds, and record the results of the rounds."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from ..algorithm.epoch_plan import (
    EpochPlan,
    RoundShape,
    plan_epoch,
    round_shape,
)
from ..algorithm.local_steps import Participant, SystemAwareSteps, fewest_steps
from ..algorithm.loss_table import LossTable
from ..algorithm.randomness import derived_seed
from ..algorithm.sampling import SampleList
from ..algorithm.sampling_stats import SamplingStats, sampling_stats
from ..algorithm.selection import Selected, SelectionRequest
from ..algorithm.validation import checked_selected
from ..errors import UsageError
from ..fields import from_record, to_record
from ..flower.array_records import tensors_of, view_record
from ..protocol import TrainOrder
from .budget import Budget
from .checks import refuse_missing_tier, refuse_nobody
from .plan_state import PlannerProgress, PlannerSettings
from .round import Outcome, Round
from .run_clock import RunClock
from .workers import Worker

_LOG = logging.getLogger(__name__)

_ROUND_SECONDS = 0.3
"""Longest computing in a round that measures speeds, unless one step takes longer."""


@dataclass(eq=False)
class Planner:
    """Plan of the epochs and rounds, and the progress of the run.

    Only `record` writes the losses in `table`. Before the first epoch, `plan` and its
    `sampling_stats` are unset. Further attributes:

    - `workers`: those of the plan.
    - `averaged_momentum`: sent with every order of the next round; for the policy ``"average"``.
    - `resumed_momentum`: sent to each worker, by index, after a resume until an order succeeds; for
      the policy ``"keep"``.
    - `resumed_models`: the workers' own models after the last round, by index, for the first round
      after a resume; with `overlap`.
    - `pauses`: whether the workers wait after the next round, and `ahead` whether they do the first
      step of the round after it instead.
    - `measures_in_rounds`: whether rounds of training measure unknown speeds, as for scripts.
    - `measured`: seconds per step by worker index, as far as known, while rounds measure speeds;
      else None. The rest of the epoch is planned again after each of these rounds.
    - `budget`: of the run, which schedules follow.
    - `clock`: seconds of the rounds so far; not in a checkpoint, because ``rounds.jsonl`` has them.
    """

    settings: PlannerSettings

    def __post_init__(self) -> None:
        self.table = LossTable(self.settings.num_samples)
        self.progress = PlannerProgress()
        self.budget = Budget()
        self.clock = RunClock()
        self.plan: EpochPlan
        self.sampling_stats: SamplingStats
        self.workers: list[Worker] = []
        self.averaged_momentum: ArrayRecord | None = None
        self.resumed_momentum: dict[int, ArrayRecord] = {}
        self.resumed_models: dict[int, ArrayRecord] = {}
        self.pauses = self.ahead = False
        self._last_rate = self._last_progress = 0.0
        self.measured: dict[int, float] | None = None
        self.measures_in_rounds = False
        self._without_room: set[int] = set()

    def _count(self, **changes: Any) -> None:
        self.progress = replace(self.progress, **changes)

    @property
    def epoch_ended(self) -> bool:
        """Whether the epoch has no rounds left; True before the first epoch."""
        return self.progress.epoch == 0 or self.progress.rounds_done == self.plan.rounds

    @property
    def epochs_done(self) -> float:
        """Number of completed epochs, including the completed share of the current one."""
        return self.progress.epoch and self.progress.epoch - 1 + self._share_done

    @property
    def _share_done(self) -> float:
        progress = self.progress
        done = progress.rounds_done - progress.rounds_before
        rounds = self.plan.rounds - progress.rounds_before
        return progress.share_before + (1 - progress.share_before) * (done / rounds)

    @property
    def used(self) -> Budget:
        """Used part of the budget."""
        progress = self.progress
        counts = progress.rounds_total, progress.samples_trained
        return Budget(self.epochs_done, self.clock.budget_seconds, *counts)

    @property
    def budget_share(self) -> float:
        """Used share of the budget; 1 or more at its end."""
        return self.budget.share(self.used)

    def plan_is_due(self, active: Sequence[Worker]) -> bool:
        """Return whether the next round begins an epoch: the last one ended or lost its workers."""
        return self.epoch_ended or not any(worker in active for worker in self.workers)

    @property
    def rest_is_due(self) -> bool:
        """Whether the rest of the epoch is planned again before its next round."""
        return self.measured is not None or self.progress.rounds_done == self.plan.lists_end

    def next_round(self, server_round: int, active: Sequence[Worker], arrays: ArrayRecord) -> Round:
        """Return the next round, with an order for each worker that trains.

        Plans an epoch if one is due. If a planned worker is gone, its samples are skipped. The
        active workers are those that can get an order, in worker order. UsageError if the settings
        do not fit the workers or the data; AggregationError without a worker.
        """
        if self.progress.epoch == 0:
            self.check(active)
        if self.plan_is_due(active):
            self._plan(server_round, active)
        elif self.rest_is_due:
            others = [worker for worker in active if worker not in self.training(active)]
            self._plan(server_round, [*self.workers, *others], is_rest=True)
        share = self.budget_share
        rate = self.settings.learning_rate.at(
            self.progress.epoch, share, self.progress.rounds_done, self.plan.rounds
        )
        self.ahead = self.settings.overlap and not (self.pauses or self._may_be_last())
        orders = [
            (worker, self._order(server_round, rank, worker, rate, share, arrays))
            for rank, worker in enumerate(self.workers)
            if worker in active
        ]
        position = self.progress.epoch, self.progress.rounds_done + 1, self.plan.rounds
        return Round(orders, arrays, self.settings.keys, self.settings.batch_size, *position)

    def prepare(self, server_round: int) -> None:
        """Draw the seeds of a round before its model is there, so that its orders leave sooner."""
        for worker in self.workers:
            self._seed(server_round, worker)  # which is cached

    @property
    def continues(self) -> bool:
        """Whether the next round begins on the workers' own models."""
        return self.settings.overlap and not (self.epoch_ended or self.rest_is_due)

    def _may_be_last(self) -> bool:
        """Return whether the next round is the last one of its plan, or may be that of the budget.

        A round may take twice as long as the last ones.
        """
        plan, used = self.plan, self.used
        samples = used.samples + sum(plan.shape.samples_per_round)
        seconds = used.seconds * (1 + 2 / max(1, used.rounds))
        end = Budget(0, seconds, used.rounds + 1, samples)
        is_last = self.progress.rounds_done + 1 >= min(plan.rounds, plan.lists_end)
        return is_last or self.measured is not None or self.budget.share(end) >= 1

    def _order(
        self,
        server_round: int,
        rank: int,
        worker: Worker,
        rate: float,
        budget_share: float,
        arrays: ArrayRecord,
    ) -> TrainOrder:
        shape, per_round = self.plan.shape, self.plan.shape.samples_per_round
        in_stream = self.settings.sampler.is_stream and self.settings.selection is None
        done, plan = self.progress.rounds_done, self.plan
        overlaps = self.settings.overlap and done > max(0, plan.first_round)
        overlaps &= not worker.failures_in_a_row  # its own model may not be finite
        ahead: dict[str, Any] = {}
        if self.ahead:
            weights = plan.sample_weights(done + 1, rank)
            ahead = {
                "next_indices": plan.indices(done + 1, rank)[: shape.batch_sizes[rank]],
                "next_weights": None if weights is None else weights[: shape.batch_sizes[rank]],
                "next_seed": self._seed(server_round + 1, worker),
            }
        return TrainOrder(
            round=server_round,
            epoch=self.progress.epoch,
            local_steps=shape.local_steps[rank],
            batch_size=shape.batch_sizes[rank],
            learning_rate=rate,
            seed=self._seed(server_round, worker),
            deadline_seconds=self.settings.deadline_seconds,
            momentum_policy=self.settings.momentum_buffers,
            indices=self.plan.indices(self.progress.rounds_done, rank),
            sample_weights=self.plan.sample_weights(self.progress.rounds_done, rank),
            arrays=arrays,
            momentum=self.averaged_momentum or self.resumed_momentum.get(worker.index),
            progress=min(1.0, budget_share),
            stream_start=self.samples_planned_so_far + sum(per_round[:rank]) if in_stream else 0,
            stream_stride=sum(per_round) if in_stream else 0,
            overlap=overlaps,
            last_learning_rate=self._last_rate if overlaps else 0.0,
            last_progress=self._last_progress if overlaps else 0.0,
            own_model=self.resumed_models.get(worker.index) if overlaps else None,
            **ahead,
        )

    def _seed(self, server_round: int, worker: Worker) -> int:
        return derived_seed(self.settings.seed, "order", server_round, worker.index)

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
                    self.settings.batch_size,
                    per_epoch=self.settings.step_policy.follows_speeds,
                )
        if self.settings.overlap and outcomes:
            order = outcomes[0].order
            self._last_rate, self._last_progress = order.learning_rate, order.progress
        self.resumed_models.clear()
        before = self.progress
        self._count(
            samples_trained=before.samples_trained + int(sum(o.load for o in outcomes)),
            samples_cut_off=before.samples_cut_off + sum(o.cut_off for o in outcomes),
            rounds_done=before.rounds_done + 1,
            rounds_total=before.rounds_total + 1,
        )
        if momentum is not None:
            self.averaged_momentum = momentum

    def check(self, workers: Sequence[Worker]) -> RoundShape:
        """Check that a run can begin with these workers, and return the shape of its rounds.

        With an open step policy it is the shape of the shortest rounds. UsageError if a required
        tier is missing, or not even one step of every worker fits into the data; AggregationError
        without a worker.
        """
        refuse_nobody(workers)
        refuse_missing_tier(
            workers, self.settings.sampler, self.settings.train_on, self.settings.batch_size
        )
        policy, steps = self.settings.step_policy, self.settings.local_steps_fast
        if policy.is_open:
            steps = fewest_steps(policy, self.participants(self.training(workers)), 0.0)
        return self.shape(workers, steps)

    def training(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return the workers that train."""
        return [worker for worker in workers if worker.fast or not self.settings.train_on.fast_only]

    def fewest_steps(self, workers: Sequence[Worker], overhead_seconds: float | None) -> int:
        """Return the best tau_fast of an open step policy; else the tau_fast of the run.

        `overhead_seconds` is the duration of a round without computing; None or 0 if unknown.
        """
        if not self.settings.step_policy.is_open:
            return self.settings.local_steps_fast
        training, overhead_steps = self.training(workers), None
        by_speed = sorted(training, key=lambda w: w.samples_per_second(self.settings.batch_size))
        if overhead_seconds and by_speed and by_speed[-1].profile.seconds_per_step:
            overhead_steps = overhead_seconds / by_speed[-1].profile.seconds_per_step
        return fewest_steps(self.settings.step_policy, self.participants(training), overhead_steps)

    def take_steps(self, local_steps_fast: int) -> None:
        """Set the tau_fast of an open step policy."""
        if self.settings.step_policy.is_open:
            policy = self.settings.step_policy.with_local_steps(local_steps_fast)
            self.settings = replace(
                self.settings, step_policy=policy, local_steps_fast=local_steps_fast
            )

    def shape(
        self, workers: Sequence[Worker], local_steps_fast: int, selected: int | None = None
    ) -> RoundShape:
        """Return the shape of a round with this tau_fast.

        `selected` is the number of samples of the epoch; by default all. UsageError if not even one
        step of every worker fits into the data.
        """
        policy = self.settings.step_policy.with_local_steps(local_steps_fast)
        participants = self.participants(self.training(workers))
        if self.measured is not None and policy.with_local_steps(1).needs_speeds:
            known = [
                self.measured.get(worker.index) or worker.profile.seconds_per_step
                for worker in self.training(workers)
            ]
            most = min([_ROUND_SECONDS, *(local_steps_fast * s for s in known if s)])
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
                self.settings.mode,
                local_steps_fast,
                len(workers),
                selected or self.settings.num_samples,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None

    def participants(self, training: Sequence[Worker]) -> list[Participant]:
        """Return the workers as step policies see them; gamma is relative to the fastest one."""
        participants = [worker.participant(self.settings.batch_size) for worker in training]
        # The fastest by samples per second; with equal batches the largest gamma.
        speeds = ((p.speed_ratio or 0.0, p.own_batch) for p in participants)
        fastest = max(((ratio * batch, ratio) for ratio, batch in speeds), default=(0.0, 0.0))[1]
        ratios = [p.speed_ratio and p.speed_ratio / fastest for p in participants]
        return [replace(p, speed_ratio=r) for p, r in zip(participants, ratios, strict=True)]

    def computing_seconds(self, training: Sequence[Worker], shape: RoundShape) -> list[float]:
        """Return how long each training worker computes in a round; 0 if its speed is unknown."""
        return [
            count / worker.own_batch(self.settings.batch_size) * worker.profile.seconds_per_step
            for count, worker in zip(shape.samples_per_round, training, strict=True)
        ]

    @property
    def samples_planned_so_far(self) -> int:
        """Samples of all completed rounds: trained on, skipped or cut off."""
        if self.progress.epoch == 0:
            return 0
        rounds_left = self.plan.rounds - self.progress.rounds_done
        return self.progress.samples_planned - rounds_left * sum(self.plan.shape.samples_per_round)

    @property
    def samples_given_up(self) -> int:
        """Skipped samples: those of failed orders, and of workers that were gone."""
        return (
            self.samples_planned_so_far
            - self.progress.samples_trained
            - self.progress.samples_cut_off
        )

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for a checkpoint after at least one round."""
        plan, settings = self.plan, self.settings
        return {
            "counters": asdict(self.progress),
            "local-steps-fast": 0 if settings.step_policy.is_open else settings.local_steps_fast,
            "table": self.table.state_dict(),
            "stats": {n: np.asarray(v) for n, v in asdict(self.sampling_stats).items()},
            "planned-for": [worker.index for worker in self.workers],
            "last-rate": [self._last_rate, self._last_progress],
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
        before = {"rounds_before": 0, "share_before": 0.0}  # 0.1.0 has none
        counters = before | state["counters"]
        if counters.keys() != asdict(self.progress).keys():
            raise ValueError("its counters belong to another version")
        self.table.load_state_dict(state["table"])
        self.progress = PlannerProgress(**counters)
        if state["local-steps-fast"]:
            self.take_steps(state["local-steps-fast"])
        self.sampling_stats = SamplingStats(**{n: v.item() for n, v in state["stats"].items()})
        self.workers = [workers[index] for index in state["planned-for"]]
        self._last_rate, self._last_progress = state.get("last-rate", (0.0, 0.0))
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
        refuse_nobody(self.training(workers))
        workers = self._those_that_fit(workers)
        training = self.training(workers)
        settings, before = self.settings, self.progress
        rounds_per_epoch = max(1.0, before.rounds_total / (self.epochs_done or 1))
        epoch, done, share = before.epoch + 1, 0, 0.0
        if is_rest:
            epoch, done, share = before.epoch, before.rounds_done, self._share_done
        size, selected = settings.num_samples, None
        if settings.selection is not None:
            request = SelectionRequest(settings.seed, epoch, self.budget_share)
            chosen = settings.selection.select(request, self.table)
            selected = checked_selected(settings.selection, chosen, settings.num_samples)
            size = len(selected.indices)
        if is_rest:
            self._count(samples_planned=self.samples_planned_so_far)
        else:
            self._count(samples_due=before.samples_due + size)
        shape = self.shape(workers, settings.local_steps_fast, size)
        plan = self.plan_lists(epoch, shape, training, done, selected)
        if plan.first_round == done:  # new lists; now, because the epoch changes the losses
            self.sampling_stats = sampling_stats(
                plan, self.participants(training), self.table, server_round - 1, rounds_per_epoch
            )
        if not is_rest or plan.rounds != self.plan.rounds:
            self._count(rounds_before=done, share_before=share)
        planned = (plan.rounds - done) * sum(plan.shape.samples_per_round)
        self._count(
            epoch=epoch,
            rounds_done=done,
            began=before.began or len(training),
            samples_planned=self.progress.samples_planned + planned,
        )
        self.plan, self.workers = plan, training

    def plan_lists(
        self,
        epoch: int,
        shape: RoundShape,
        training: Sequence[Worker],
        rounds_before: int,
        selected: Selected | None,
    ) -> EpochPlan:
        """Return the plan of an epoch, or of its rest after `rounds_before`."""
        seed = self.settings.seed
        if rounds_before and (selected or not self.settings.sampler.is_stream):
            seed = derived_seed(seed, "rest-of-epoch", rounds_before)  # not the first samples again
        return self.new_lists(seed, epoch, shape, training, rounds_before, selected)

    def new_lists(
        self,
        seed: int,
        epoch: int,
        shape: RoundShape,
        training: Sequence[Worker],
        rounds_before: int,
        selected: Selected | None = None,
        listed_rounds: int | None = None,
    ) -> EpochPlan:
        """Return a plan with new sample lists, for `listed_rounds` or the epoch.

        While rounds measure speeds, they are for one round.
        """
        return plan_epoch(
            seed=seed,
            epoch=epoch,
            participants=self.participants(training),
            shape=shape,
            sampler=self.settings.sampler,
            table=self.table,
            samples_before=self.progress.samples_planned,
            samples_due=self.progress.samples_due,
            selected=selected,
            rounds_before=rounds_before,
            listed_rounds=1 if self.measured is not None else listed_rounds,
        )

    def _those_that_fit(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Leave out workers that joined late if one step of all does not fit into the data."""
        while self.progress.epoch and len(self.training(workers)) > 1:
            try:
                self.shape(workers, self.settings.local_steps_fast)
                break
            except UsageError as error:
                *workers, late = workers
                if late.index not in self._without_room:
                    self._without_room.add(late.index)
                    what = "%s is left out of epoch %d: %s"
                    _LOG.warning(what, late.label, self.progress.epoch + 1, error)
        return workers
