"""BiasedLocalSGD: biased local SGD as a Flower strategy."""

import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import FedAvg, Result

from ..algorithm.averaging import LoadWeighting, Weighting, node_weight, weighted_average
from ..algorithm.catalog import TrainOn
from ..algorithm.epoch_plan import EpochMode
from ..algorithm.local_steps import FAST_SPEED_RATIO, Clock, StepPolicy, SystemAwareSteps
from ..algorithm.outer_optimizer import OuterOptimizer
from ..algorithm.sampling import HIGH_LOSS_RATIO, Sampler, SeparatedSampler
from ..algorithm.schedules import LearningRate
from ..array_records import view_record
from ..config import check_ranges
from ..errors import UsageError
from ..protocol import MOMENTUM_POLICIES, HostOrders, MomentumPolicy, TrainOrder
from ..protocol.records import records_of
from .aggregation import Aggregation
from .fit_loop import fit
from .planner import Planner
from .profiles import node_messages
from .replies import ModelShape, average_metrics, average_momentum, read_replies, record_losses
from .round_metrics import RoundRecord, round_record
from .slow_reduce import SlowWorkerReduce
from .workers import DEAD_BAND, Worker, WorkerRegistry

_LOG = logging.getLogger("flwr")  # progress is shown at the level of Flower's own strategies


class BiasedLocalSGD(FedAvg):
    """Biased local SGD: unequal local steps, hard samples for fast workers, load weights.

    Implementation of "Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems"
    (https://arxiv.org/abs/2508.08540).

    Before the first round every node is queried for its profile. In each round each worker gets
    an order of its own: how many steps, on which samples. The models are averaged by the load
    that was really completed, and the losses that the workers recorded steer the next epoch.

    A worker that fails, or sends a model that is not finite or has another shape, has weight 0
    in that round; its samples are given up for this epoch. One whose process died may come back.
    One whose ClientApp raised is left out until its node connects with a new node id; on the
    local grid, for the rest of the run. A round in which no worker succeeded raises
    ``AggregationError``.

    Parameters
    ----------
    num_samples : int
        N; every worker can read all of them.
    batch_size : int (default: 32)
        Samples per local step, >= 2.
    local_steps : int or StepPolicy (default: 32)
        tau_fast, or a policy that decides the steps of every worker.
    local_steps_slow : int, optional
        Steps of every slow worker; None derives them from speeds that are measured before the
        first round, unless the nodes know them.
    local_steps_fast : int, optional
        tau_fast where `local_steps` is a policy of your own; only ``epoch = "table"`` needs it.
    high_loss_ratio : float (default: HIGH_LOSS_RATIO)
        lambda: share of the fast workers' samples chosen by highest loss, in [0, 1].
    learning_rate : float or LearningRate (default: 0.1)
        Sent in every order.
    sampler : Sampler, optional
        Instead of the paper's, with `high_loss_ratio`.
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
        Which tensors are parameters; by default all floating ones but BatchNorm's statistics.
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
        local_steps: int | StepPolicy = 32,
        high_loss_ratio: float = HIGH_LOSS_RATIO,
        *,
        local_steps_slow: int | None = None,
        local_steps_fast: int | None = None,
        learning_rate: float | LearningRate = 0.1,
        sampler: Sampler | None = None,
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
        if isinstance(local_steps, int):
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
        _check_choices(local_steps, weights, momentum_buffers, clock, rebalance)
        self._dead_band: tuple[float, float] | None = DEAD_BAND if rebalance else None
        if local_steps.follows_speeds and clock == "wall":
            self._dead_band = 0.0, 0.0
        self.registry = WorkerRegistry(
            max(self.min_available_nodes, 1), fast_threshold, local_steps, batch_size, clock
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
        )
        self.aggregation = Aggregation(weights, outer_optimizer, parameter_names)
        self.on_round: Callable[[RoundRecord], None] | None = None
        """Called after every round."""
        self._orders: list[tuple[Worker, TrainOrder]] = []
        self._model_shape: ModelShape | None = None
        self._momentum: ArrayRecord | None = None
        self._slow_reduce: SlowWorkerReduce | None = None
        self._planning_seconds = 0.0
        self._sent_at = 0.0

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
            If no worker is left.
        """
        self.registry.update(grid)
        self._refuse_unfit_hosts()
        if self.planner.epoch_ended and self._dead_band:
            self.registry.follow_speeds(*self._dead_band)
        active = self.registry.active
        slow = [worker for worker in active if not worker.fast]
        reduces = bool(slow) and self.planner.train_on.slow_reduce
        self._slow_reduce = SlowWorkerReduce(grid, slow) if reduces else None
        began = time.perf_counter()
        self._orders = self.planner.orders(server_round, active, arrays, self._momentum)
        self._planning_seconds = time.perf_counter() - began
        self._model_shape = ModelShape(arrays)
        messages = self._messages(config)
        done, rounds = self.planner.rounds_done, self.planner.plan.rounds
        _LOG.info("epoch %d, round %d of %d", self.planner.epoch, done + 1, rounds)
        self._sent_at = time.time()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the checked replies by completed load, and record their losses.

        Raises
        ------
        AggregationError
            If no worker completed a step that can be used.
        """
        assert self._model_shape is not None, "configure_train comes first"
        replies = list(replies)
        received_at = time.time()
        outcomes = read_replies(replies, self._orders, self._model_shape, self.weighted_by_key)
        loads = [outcome.load for outcome in outcomes]
        if not any(loads):
            reasons = "; ".join(f"{o.worker.label}: {o.failure or 'no step'}" for o in outcomes)
            raise AggregationError(f"round {server_round}: no worker succeeded ({reasons})")
        self.planner.samples_given_up += record_losses(outcomes, self.planner.table, server_round)
        self.planner.finish_round()
        before = outcomes[0].order.arrays
        arrays, weights = self.aggregation.next_model(
            before, outcomes, self._slow_reduce or weighted_average
        )
        if self.planner.momentum_buffers == "average":
            momentum = average_momentum(outcomes)
            self._momentum = view_record(momentum) if momentum else None
        metrics = average_metrics(outcomes, self.train_metrics_aggr_fn, self.weighted_by_key)
        if self._dead_band:
            self.registry.note_times(outcomes, self.planner.batch_size)
        if self.on_round is not None:
            record = round_record(
                self.planner,
                outcomes,
                weights,
                sent_at=self._sent_at,
                received_at=received_at,
                planning_seconds=self._planning_seconds,
                model_bytes=self._model_shape.num_bytes,
                summing=self._slow_reduce.summing if self._slow_reduce else (),
            )
            self.on_round(record)
        return arrays, metrics

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
            return HostOrders(by_rank, *keys, **rule)

        return node_messages(contents, "train", to_host)

    def _refuse_unfit_hosts(self) -> None:
        """Refuse nodes with several devices whose models cannot be averaged there.

        Before the first epoch that ends the run; a node that comes later is left out.
        """
        if not node_weight(self.aggregation.weighting):
            weighting = type(self.aggregation.weighting).__name__
            reason = f"{weighting} cannot be averaged there: only the built-in weightings can"
        elif self.planner.train_on.slow_reduce:
            reason = "slow workers reduce models in shared memory only"
        else:
            return
        for worker in self.registry.active:
            if worker.local_rank is None:
                continue
            worker.excluded = (
                f"is behind a node with several devices, and {reason}; "
                "start one SuperNode for each device"
            )
            if self.planner.epoch == 0:
                raise UsageError(f"worker {worker.label} {worker.excluded}")
            _LOG.error("worker %s does not take part: it %s", worker.label, worker.excluded)

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


def _check_choices(
    local_steps: StepPolicy,
    weights: Weighting,
    momentum_buffers: str,
    clock: str,
    rebalance: bool,
) -> None:
    """Refuse choices that do not go together, by the names of the settings."""
    if not momentum_buffers:  # the setting may be empty, for that of the algorithm
        raise UsageError(f"momentum-buffers must be one of {', '.join(MOMENTUM_POLICIES)}")
    if weights.momentum_buffers not in ("", momentum_buffers):
        raise UsageError(
            f'momentum-buffers = "{momentum_buffers}" does not go with '
            f'{type(weights).__name__}, which needs "{weights.momentum_buffers}"'
        )
    if rebalance and not local_steps.needs_speeds:
        raise UsageError(
            f"rebalance = true needs steps that come from speeds, not {local_steps}; use "
            'local-steps-slow = "auto" or steps = "by-speed"'
        )
    if rebalance and clock == "device":
        raise UsageError(
            'rebalance = true follows measured speeds, but clock = "device" computes with fixed '
            'ones; use clock = "wall"'
        )
