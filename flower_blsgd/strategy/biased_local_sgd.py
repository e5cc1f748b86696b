"""BiasedLocalSGD: biased local SGD as a Flower strategy."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import FedAvg, Result

from ..algorithm.averaging import LoadWeighting, Weighting, node_weight, weighted_average
from ..algorithm.catalog import TrainOn
from ..algorithm.epoch_plan import EpochMode
from ..algorithm.local_steps import (
    FAST_SPEED_RATIO,
    AutoSteps,
    Clock,
    StepPolicy,
    SystemAwareSteps,
)
from ..algorithm.outer_optimizer import OuterOptimizer
from ..algorithm.sampling import HIGH_LOSS_RATIO, Sampler, SeparatedSampler, UnifiedSampler
from ..algorithm.schedules import LearningRate
from ..algorithm.selection import Selection
from ..config import check_ranges
from ..errors import UsageError
from ..grids.array_records import view_record
from ..protocol import MOMENTUM_POLICIES, HostOrders, MomentumPolicy, TrainOrder, TrainReport
from ..protocol.records import records_of
from .aggregation import Aggregation
from .fit_loop import EpochEnd, fit
from .patience import Patience
from .planner import Planner
from .profiles import Address, node_messages
from .replies import ModelShape, average_metrics, average_momentum, read_replies, record_losses
from .round_metrics import RoundRecord, round_record
from .slow_reduce import SlowWorkerReduce
from .speeds import measure_rounds
from .workers import DEAD_BAND, MOST_FAILURES, Worker, WorkerRegistry

_LOG = logging.getLogger("flwr")  # progress is shown at the level of Flower's own strategies


class BiasedLocalSGD(FedAvg):
    """Biased local SGD: unequal local steps, hard samples for fast workers, load weights.

    Implementation of "Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems"
    (https://arxiv.org/abs/2508.08540).

    Before the first round every node is queried for its profile. In each round each worker gets
    an order of its own: how many steps, on which samples. The models are averaged by the load
    that was really completed, and the losses that the workers recorded steer the next epoch.

    A worker that fails, or sends a model or a loss that is not finite or has another shape, has
    weight 0 in that round; its samples are given up for this epoch. After three failures in a row
    it is left out, and queried again when the next epoch is planned. A round in which no worker
    succeeds is given up, and the model stays as it is. ``AggregationError`` is raised by the third
    such round in a row, by one that uses up the budget before anything was trained, and by an epoch
    that would begin with fewer training workers than ``min_available_nodes``, if so many began, and
    that do not come back within a minute.

    Parameters
    ----------
    num_samples : int
        N; every worker can read all of them.
    batch_size : int (default: 32)
        Samples per local step, >= 2, of workers without a batch size of their own.
    local_steps : int, "auto" or StepPolicy (default: 32)
        tau_fast, or a policy that decides the steps of every worker. ``"auto"`` measures before
        the first round and takes the fewest with which little time is wasted (`AutoSteps`).
    local_steps_slow : int, optional
        Steps of every slow worker; None derives them from speeds that are measured before the
        first round, unless the nodes know them. A worker whose speed stays unknown does tau_fast.
    local_steps_fast : int, optional
        tau_fast where `local_steps` is a policy of your own; only ``epoch = "table"`` needs it.
    high_loss_ratio : float (default: HIGH_LOSS_RATIO)
        lambda: share of the fast workers' samples chosen by highest loss, in [0, 1].
    learning_rate : float or LearningRate (default: 0.1)
        Sent in every order.
    sampler : Sampler, optional
        Instead of the paper's, with `high_loss_ratio`.
    selection : Selection, optional
        Which samples an epoch has; all by default.
    weights : Weighting, optional
        Instead of weights by completed load.
    epoch : {"samples", "table"} (default: "samples")
        What an epoch is: N samples, or the rounds of the paper's table.
    momentum_buffers : {"keep", "reset", "average"} (default: "keep")
        What happens to momentum between rounds.
    deadline_seconds : float (default: 0)
        A worker stops after the step in which this time is over; 0 for no deadline.
    clock : {"wall", "device"} (default: "wall")
        Speeds are measured with all workers computing, or each alone (and then always).
    train_on : TrainOn, optional
        Which workers train; all by default.
    outer_optimizer : OuterOptimizer, optional
        Moves the parameters along the averaged update.
    parameter_names : collection of str, optional
        Which tensors are parameters; by default all floating ones but BatchNorm's statistics. Of
        tied weights, which have several names in a state dict, one is enough.
    rebalance : bool (default: False)
        Steps that come from speeds follow them: a moving average, one change per epoch at most.
    fast_threshold : float (default: 0.7)
        An unnamed worker is fast if its speed ratio is above this.
    seed : int (default: 0)
        Every draw is a pure function of it, the epoch or round, and the worker.
    **fedavg_arguments
        As for Flower's FedAvg. ``fraction_train`` must be 1: all workers take part.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int = 32,
        local_steps: int | Literal["auto"] | StepPolicy = 32,
        high_loss_ratio: float = HIGH_LOSS_RATIO,
        *,
        local_steps_slow: int | None = None,
        local_steps_fast: int | None = None,
        learning_rate: float | LearningRate = 0.1,
        sampler: Sampler | None = None,
        selection: Selection | None = None,
        weights: Weighting | None = None,
        epoch: EpochMode = "samples",
        momentum_buffers: MomentumPolicy = "keep",
        deadline_seconds: float = 0.0,
        clock: Clock = "wall",
        train_on: TrainOn | None = None,
        outer_optimizer: OuterOptimizer | None = None,
        parameter_names: Collection[str] | None = None,
        rebalance: bool = False,
        fast_threshold: float = FAST_SPEED_RATIO,
        seed: int = 0,
        **fedavg_arguments: Any,
    ) -> None:
        super().__init__(**fedavg_arguments)
        if local_steps == "auto":
            local_steps = AutoSteps(lambda steps: SystemAwareSteps(steps, local_steps_slow))
        elif isinstance(local_steps, int):
            local_steps = SystemAwareSteps(local_steps, local_steps_slow)
        if local_steps_fast is None and isinstance(local_steps, SystemAwareSteps):
            local_steps_fast = local_steps.local_steps_fast
        if not isinstance(learning_rate, LearningRate):
            learning_rate = LearningRate(learning_rate)
        weights = weights or LoadWeighting()
        if self.fraction_train != 1.0:
            raise ValueError(
                f"fraction_train = {self.fraction_train}: all workers take part in every round"
            )
        check_ranges(
            batch_size=batch_size,
            epoch=epoch,
            momentum_buffers=momentum_buffers,
            deadline_seconds=deadline_seconds,
            clock=clock,
            fast_threshold=fast_threshold,
        )
        _check_epoch(selection, sampler, epoch)
        if not momentum_buffers:  # the setting may be empty, for that of the algorithm
            raise UsageError(f"momentum-buffers must be one of {', '.join(MOMENTUM_POLICIES)}")
        if weights.momentum_buffers not in ("", momentum_buffers):
            raise UsageError(
                f'momentum-buffers = "{momentum_buffers}" does not go with '
                f'{type(weights).__name__}, which needs "{weights.momentum_buffers}"'
            )
        policy = local_steps.policy_of(1) if isinstance(local_steps, AutoSteps) else local_steps
        if rebalance and not policy.needs_speeds:
            raise UsageError(
                f"rebalance = true needs steps that come from speeds, not {policy}; use "
                'local-steps-slow = "auto" or steps = "by-speed"'
            )
        if rebalance and clock == "device":
            raise UsageError(
                'rebalance = true follows measured speeds, but clock = "device" computes with '
                'fixed ones; use clock = "wall"'
            )
        self._dead_band: tuple[float, float] | None = DEAD_BAND if rebalance else None
        if local_steps.follows_speeds and clock == "wall":
            self._dead_band = 0.0, 0.0
        no_hosts = ""
        if not node_weight(weights):
            rule = "only the built-in weightings can"
            no_hosts = f"{type(weights).__name__} cannot be averaged there: {rule}"
        elif train_on and train_on.slow_reduce:
            no_hosts = "slow workers reduce models in shared memory only"
        self.registry = WorkerRegistry(
            max(self.min_available_nodes, 1),
            fast_threshold,
            local_steps,
            batch_size,
            clock,
            no_hosts,
            num_samples,
        )
        self.planner = Planner(
            num_samples,
            batch_size,
            step_policy=local_steps,
            local_steps_fast=local_steps_fast or SystemAwareSteps.local_steps_fast,
            sampler=sampler or SeparatedSampler(high_loss_ratio),
            mode=epoch,
            learning_rate=learning_rate,
            momentum_buffers=momentum_buffers,
            deadline_seconds=deadline_seconds,
            seed=seed,
            train_on=train_on or TrainOn(),
            selection=selection,
        )
        self.aggregation = Aggregation(weights, outer_optimizer, parameter_names)
        self.on_round: Callable[[RoundRecord], None] | None = None
        """Called after every round."""
        self.averaged_momentum: ArrayRecord | None = None
        """With the policy ``"average"``: that of the last round."""
        self.resumed_momentum: dict[int, ArrayRecord] = {}
        """With the policy ``"keep"``, by worker index: what orders bring it until one succeeds."""
        self.unevaluated: list[EpochEnd] = []
        """The models whose async evaluation is outstanding."""
        self._orders: list[tuple[Worker, TrainOrder]] = []
        self._sent: list[Metadata] = []
        self._patience, self._rounds_lost = Patience(), 0
        self._model_shape: ModelShape | None = None
        self._slow_reduce: SlowWorkerReduce | None = None
        self._sent_at = self._sent_on_clock = self._planning_seconds = 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one order per worker, each with a payload of its own.

        Queries new nodes for their profiles, and plans the next epoch when the last one is over.

        Raises
        ------
        UsageError
            If the settings do not fit the workers or the data.
        AggregationError
            If no worker is left, or too few to begin another epoch.
        """
        self.registry.update(grid)
        self.choose_local_steps(grid, arrays)
        if self.planner.epoch and self.planner.plan_is_due(self.registry.active):
            self.registry.gather(grid, self.planner.training, self.planner.began)
        active = self.registry.active
        began = time.perf_counter()
        if self.planner.plan_is_due(active):
            self.registry.assign_tiers()
            if self._dead_band:
                self.registry.follow_speeds(*self._dead_band)
        momentum = self.resumed_momentum
        if self.averaged_momentum is not None:
            momentum = dict.fromkeys((w.index for w in active), self.averaged_momentum)
        self._orders = self.planner.orders(server_round, active, arrays, momentum)
        self._planning_seconds = time.perf_counter() - began
        self._slow_reduce = None
        slow = [worker for worker in active if not worker.fast]
        if slow and self.planner.train_on.slow_reduce:
            self._slow_reduce = SlowWorkerReduce(grid, slow, self.patience_seconds())
        self._model_shape = ModelShape(arrays)
        messages = self._messages(config)
        self._sent = [message.metadata for message in messages]  # their ids come when they are sent
        done, rounds = self.planner.rounds_done, self.planner.plan.rounds
        _LOG.info("epoch %d, round %d of %d", self.planner.epoch, done + 1, rounds)
        self._sent_at, self._sent_on_clock = time.time(), time.perf_counter()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the checked replies by completed load, and record their losses.

        Raises
        ------
        AggregationError
            If no worker completed a step that can be used, in the third round in a row, or in the
            last one of a run that trained on nothing. The round counts as over, so a run that is
            resumed continues with other samples.
        """
        assert self._model_shape is not None, "configure_train comes first"
        replies = list(replies)
        reply_seconds = time.perf_counter() - self._sent_on_clock
        ids = {sent.dst_node_id: sent.message_id for sent in self._sent}
        outcomes = read_replies(replies, self._orders, self._model_shape, self.weighted_by_key, ids)
        seconds = reply_seconds
        if any(outcome.failure and outcome.failure.kind == "late" for outcome in outcomes):
            # Of the round that says nothing, but who has computed need not compile again.
            seconds = max((o.report.compute_seconds for o in outcomes if o.report), default=0.0)
        answered = [(o.worker, o.order) for o in outcomes if not o.failure]
        self._patience.learn(seconds, _samples(answered))
        loads = [outcome.load for outcome in outcomes]
        self._rounds_lost = 0 if any(loads) else self._rounds_lost + 1
        for worker, _ in answered:
            self.resumed_momentum.pop(worker.index, None)
        record_losses(outcomes, self.planner.table, server_round)
        self.planner.finish_round(int(sum(loads)), sum(outcome.cut_off for outcome in outcomes))
        arrays, weights = outcomes[0].order.arrays, [0.0] * len(outcomes)
        metrics = MetricRecord({self.weighted_by_key: 0})
        if not self._rounds_lost:
            arrays, weights = self.aggregation.next_model(
                arrays, outcomes, self._slow_reduce or weighted_average
            )
            if self.planner.momentum_buffers == "average":
                momentum = average_momentum(outcomes)
                self.averaged_momentum = view_record(momentum) if momentum else None
            metrics = average_metrics(outcomes, self.train_metrics_aggr_fn, self.weighted_by_key)
        self.registry.note_times(outcomes, self.planner.batch_size)
        if self.on_round is not None:
            record = round_record(
                self.planner,
                outcomes,
                weights,
                sent_at=self._sent_at,
                reply_seconds=reply_seconds,
                round_seconds=time.perf_counter() - self._sent_on_clock,
                planning_seconds=self._planning_seconds,
                model_bytes=self._model_shape.num_bytes,
                summing=self._slow_reduce.summing if self._slow_reduce else (),
            )
            self.on_round(record)
        trained_nothing = not self.planner.samples_trained and self.planner.budget_share() >= 1
        if self._rounds_lost >= MOST_FAILURES or trained_nothing:
            reasons = "; ".join(
                f"{o.worker.label}: {o.failure.brief if o.failure else 'no step'}" for o in outcomes
            )
            raise AggregationError(f"round {server_round}: no worker succeeded ({reasons})")
        return arrays, metrics

    def choose_local_steps(
        self, grid: Grid, arrays: ArrayRecord, overhead_seconds: float | None = None
    ) -> bool:
        """Choose tau_fast, if that is still to be done; return whether it was.

        The overhead is everything except computing of one round. Unless it is given, it is measured
        in rounds of the shortest kind, and with it the speeds of workers whose speed was measured.
        """
        if not isinstance(self.planner.step_policy, AutoSteps):
            return False
        workers = self.registry.active
        if not overhead_seconds and any(worker.speed_ratio for worker in workers):
            training, shape = self.planner.training(workers), self.planner.check(workers)
            aggregation = replace(self.aggregation, outer_optimizer=None)

            def do_round(orders: list[TrainOrder]) -> list[TrainReport | None]:
                self._orders = list(zip(training, orders, strict=True))
                messages, patience = self._messages(ConfigRecord()), self.patience_seconds()
                replies = grid.send_and_receive(messages, timeout=patience)
                model_shape = ModelShape(arrays)
                outcomes = read_replies(replies, self._orders, model_shape, self.weighted_by_key)
                if all(outcome.report for outcome in outcomes):
                    aggregation.next_model(arrays, outcomes)
                return [outcome.report for outcome in outcomes]

            if rows := measure_rounds(do_round, arrays, shape, self.planner.num_samples):
                # Lower quartiles: what disturbs a round makes it longer, and medians vary more.
                *speeds, overhead_seconds = (
                    sorted(c)[len(c) // 4] for c in zip(*rows, strict=True)
                )
                self.registry.take_speeds(zip(training, speeds, shape.batch_sizes, strict=True))
        self.planner.choose_steps(workers, overhead_seconds)
        known = f"{overhead_seconds:.2g}" if overhead_seconds else "an unknown number of"
        what = "local-steps-fast = auto: %d, since a round takes %s s in addition to computing"
        _LOG.info(what, self.planner.local_steps_fast, known)
        return True

    def patience_seconds(self, most: float = 3600.0) -> float:
        """Return for how many seconds to wait for the replies to the orders of this round.

        A multiple of what such orders took so far, and never less than their deadline; but `most`
        in the first round of a worker, and in its first with another batch size.
        """
        known = [(worker, o) for worker, o in self._orders if not worker.failures_in_a_row]
        patience = self._patience.seconds(_samples(known), most, self.registry.start_seconds)
        return max(patience, 2 * self.planner.deadline_seconds)

    def _messages(self, config: ConfigRecord) -> list[Message]:
        """Return the messages with the round's orders.

        A node that is one worker gets that worker's order. One with several devices gets the model
        once, the orders of all its workers, and how their models are averaged there.
        """
        contents = []
        for worker, order in self._orders:
            records = order.to_records(self.arrayrecord_key, self.configrecord_key)
            if config:
                own = records_of(records, ConfigRecord)[self.configrecord_key]
                for key in config.keys() - own.keys():
                    own[key] = config[key]
            contents.append((worker.address, records))

        def to_host(by_rank: dict[int, RecordDict]) -> HostOrders:
            longest_steps = max(order.local_steps for _, order in self._orders)
            rule = self.aggregation.at_nodes(self._orders[0][1].arrays, longest_steps)
            keys = self.arrayrecord_key, self.configrecord_key, self.weighted_by_key
            return HostOrders(by_rank, *keys, **rule, patience_seconds=self.patience_seconds())

        return node_messages(contents, "train", to_host)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the workers evaluate, as FedAvg does, but only when an epoch has ended.

        It waits for no node: those that are connected evaluate, or a share of them, the first in
        worker order.
        """
        if not self.planner.epoch_ended or self.fraction_evaluate == 0.0:
            return []
        workers = self.registry.active
        count = max(int(len(workers) * self.fraction_evaluate), self.min_evaluate_nodes)
        messages = []
        for node_id in dict.fromkeys(worker.node_id for worker in workers[:count]):
            own = ConfigRecord({**config, "server-round": server_round})
            records = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: own})
            messages.append(Message(records, node_id, "evaluate"))
        return messages

    def start(  # type: ignore[override]  # later releases of Flower add arguments
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, **arguments: Any
    ) -> Result:
        """Run Flower's own loop; the budget of the learning rate is the number of rounds."""
        self.planner.budget_share = lambda: self.planner.rounds_total / num_rounds
        return super().start(grid, initial_arrays, num_rounds, **arguments)

    def fit(self, grid: Grid, initial_arrays: ArrayRecord, **arguments: Any) -> Result:
        """Run our own loop, by epochs or seconds; see `fit_loop.fit`."""
        return fit(self, grid, initial_arrays, **arguments)


def _check_epoch(selection: Selection | None, sampler: Sampler | None, epoch: EpochMode) -> None:
    """Raise UsageError if the sampler, or what an epoch is, does not go with fewer samples."""
    if not epoch:  # the setting may be empty
        raise UsageError(f"epoch = {epoch!r} must be one of {', '.join(get_args(EpochMode))}")
    reason = ""
    if isinstance(sampler, UnifiedSampler):
        reason = 'sampler = "unified" gives the second tier all that are left'
    elif sampler and sampler.horizon(2, 2):
        reason = f"{type(sampler).__name__} does not choose by the epoch"
    if selection and reason:
        raise UsageError(
            f"selection ({type(selection).__name__}) leaves samples of an epoch out, but {reason}; "
            'use "separated" or "uniform"'
        )
    if epoch == "table" and selection:
        raise UsageError(
            'selection makes epochs shorter, but epoch = "table" has as many rounds as the '
            'paper; use epoch = "samples"'
        )


def _samples(orders: Sequence[tuple[Worker, TrainOrder]]) -> dict[tuple[Address, int], int]:
    """Return by worker and batch size how many samples the orders hold."""
    return {(w.address, order.batch_size): len(order.indices) for w, order in orders}
