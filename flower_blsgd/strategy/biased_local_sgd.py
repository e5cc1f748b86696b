"""BiasedLocalSGD: biased local SGD as a Flower strategy."""

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import Result

from ..algorithm.averaging import LoadWeighting, Weighting
from ..algorithm.catalog import TrainOn
from ..algorithm.epoch_plan import EpochMode
from ..algorithm.local_steps import (
    DEFAULT_LOCAL_STEPS,
    FAST_SPEED_RATIO,
    Clock,
    StepPolicy,
    SystemAwareSteps,
)
from ..algorithm.outer_optimizer import OuterOptimizer
from ..algorithm.sampling import HIGH_LOSS_RATIO, Sampler, SeparatedSampler
from ..algorithm.schedules import LearningRate
from ..algorithm.selection import Selection
from ..config import check_ranges
from ..engines.mailbox import MailboxGrid
from ..errors import UsageError
from ..protocol import MOST_SKIPS, Average, Keys, MomentumPolicy, TrainOrder
from .averaging import Averaging, average_metrics, average_momentum
from .budget import Budget
from .checks import check_gradients, check_parts, why_no_hosts
from .connector import Connector
from .gradients import KeptModel
from .messages import Address
from .patience import Patience
from .plan_state import PlannerSettings
from .planner import Planner
from .round import Outcome, Round
from .round_metrics import RoundRecord, round_record
from .rounds import EpochEnd, EvaluateFn, TrainingLoop
from .run_clock import RunClock
from .slow_reduce import SlowWorkerReduce
from .workers import DEAD_BAND, MOST_FAILURES, Worker, WorkerRegistry

_LOG = logging.getLogger("flwr")  # progress is shown at the level of Flower's own strategies


class BiasedLocalSGD(TrainingLoop):
    """Biased local SGD: unequal local steps, high-loss samples for fast workers, load weights.

    Implementation of "Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems"
    (https://arxiv.org/abs/2508.08540).

    Before the first round every node is queried for its profile. In each round every worker gets a
    separate order with its number of steps and its samples. The models are averaged by completed
    load. The recorded losses determine the samples of the next epoch.

    A worker has weight 0 in a round in which it fails, or sends a model or a loss that is not
    finite or has the wrong shape. The samples of its order are then skipped in this epoch. After
    three failures in a row the worker is left out until the next epoch is planned, when it is
    queried again. A round without any successful worker leaves the model unchanged.
    ``AggregationError`` is raised after three such rounds in a row, or if the budget ends before
    any worker has trained. It is also raised if too few training workers remain for the next epoch
    and the missing ones do not return within a minute. The minimum is ``min_available_nodes``, or
    the number of workers in the first epoch if that was smaller.

    Parameters
    ----------
    num_samples : int
        N, the number of training samples. Every worker must be able to read all of them.
    batch_size : int (default: 32)
        Samples per local step, >= 2; ``batch=`` of a worker overrides it.
    local_steps : int, "auto" or StepPolicy (default: 32)
        tau_fast, or a policy for the steps of every worker. A worker takes tau_fast steps times its
        speed relative to the fastest one. Speeds are measured before the first round unless the
        nodes report them; a worker with an unknown speed takes tau_fast steps. ``"auto"`` measures
        and chooses the smallest tau_fast that wastes little time (`fewest_steps`).
    local_steps_slow : int, optional
        Steps of every slow worker; fast ones then take tau_fast, and no speed is measured. Cannot
        be combined with a policy.
    local_steps_fast : int, optional
        tau_fast of a custom policy; only needed for ``epoch = "table"``.
    high_loss_ratio : float, optional
        lambda: share of the fast workers' samples chosen by highest loss, in [0, 1]; by default
        `HIGH_LOSS_RATIO`. Cannot be combined with `sampler`.
    learning_rate : float or LearningRate (default: 0.1)
        Learning rate of the local steps.
    sampler : Sampler, optional
        Replaces the paper's sampler.
    selection : Selection, optional
        Selects the samples of an epoch; all by default.
    weights : Weighting, optional
        Replaces the weights by completed load.
    epoch : {"samples", "table"} (default: "samples")
        Length of an epoch: N samples, or the number of rounds in the paper's table.
    momentum_buffers : {"keep", "reset", "average"} (default: "keep")
        Policy for momentum between rounds.
    average : {"models", "gradients"} (default: "models")
        With ``"gradients"``, a round is one step: each worker computes the gradient of a batch, and
        steps its own optimizer with the average by samples. Needs a policy with one step each, such
        as `BalancedBatches`, and workers that stay between two messages.
    deadline_seconds : float (default: 0)
        A worker stops after the first step that ends later than this; 0 for no deadline.
    clock : {"wall", "device"} (default: "wall")
        Whether speeds are measured while all workers compute, or with each worker alone. With
        ``"device"``, speeds are always measured unless they are given.
    train_on : TrainOn, optional
        Which workers train; all by default.
    outer_optimizer : OuterOptimizer, optional
        Applies the averaged update to the parameters.
    parameter_names : collection of str, optional
        Names of the tensors that are parameters; by default all floating-point tensors except
        BatchNorm's statistics. One name of tied weights is enough.
    overlap : bool (default: False)
        Let workers begin a round on their own models of the last one: the change of their first
        step is added to the average. Needs workers that stay: the local grid or streams.
    rebalance : bool (default: False)
        Whether steps that depend on speeds are adapted to the speeds measured in training, at most
        once per epoch.
    fast_threshold : float (default: 0.7)
        A worker without a named tier is fast if its samples per second are more than this share of
        the fastest worker's.
    seed : int (default: 0)
        Every draw is a pure function of the seed, the epoch or round, and the worker.
    **fedavg_arguments
        Arguments of Flower's FedAvg, except ``min_train_nodes``. ``fraction_train`` must be 1,
        because all workers train in every round.

    Raises
    ------
    UsageError
        If an argument is out of range, or two exclude each other.
    """

    planner_type: ClassVar[type[Planner]] = Planner

    def __init__(
        self,
        num_samples: int,
        batch_size: int = 32,
        local_steps: int | Literal["auto"] | StepPolicy = 32,
        high_loss_ratio: float | None = None,
        *,
        local_steps_slow: int | None = None,
        local_steps_fast: int | None = None,
        learning_rate: float | LearningRate = 0.1,
        sampler: Sampler | None = None,
        selection: Selection | None = None,
        weights: Weighting | None = None,
        epoch: EpochMode = "samples",
        momentum_buffers: MomentumPolicy = "keep",
        average: Average = "models",
        deadline_seconds: float = 0.0,
        clock: Clock = "wall",
        train_on: TrainOn | None = None,
        outer_optimizer: OuterOptimizer | None = None,
        parameter_names: Collection[str] | None = None,
        overlap: bool = False,
        rebalance: bool = False,
        fast_threshold: float = FAST_SPEED_RATIO,
        seed: int = 0,
        **fedavg_arguments: Any,
    ) -> None:
        if "min_train_nodes" in fedavg_arguments:
            raise UsageError(
                "min_train_nodes: all workers train in every round; use min_available_nodes"
            )
        super().__init__(min_train_nodes=1, **fedavg_arguments)
        if self.fraction_train != 1.0:
            raise UsageError(
                f"fraction_train = {self.fraction_train}: must be 1; all workers train in every "
                "round"
            )
        if sampler is not None and high_loss_ratio is not None:
            raise UsageError(
                f"high_loss_ratio = {high_loss_ratio} cannot be combined with sampler = "
                f"{type(sampler).__name__}; pass it to the sampler"
            )
        if isinstance(local_steps, int | str):
            steps = None if local_steps == "auto" else int(local_steps)
            local_steps = SystemAwareSteps(steps, local_steps_slow)
        elif local_steps_slow is not None:
            raise UsageError(
                f"local_steps_slow = {local_steps_slow} cannot be combined with local_steps = "
                f"{type(local_steps).__name__}; pass it to the step policy"
            )
        if sampler is None:
            ratio = HIGH_LOSS_RATIO if high_loss_ratio is None else high_loss_ratio
            sampler = SeparatedSampler(ratio)
        local_steps_fast = local_steps_fast or local_steps.local_steps_fast
        if not isinstance(learning_rate, LearningRate):
            learning_rate = LearningRate(learning_rate)
        weights = weights or LoadWeighting()
        check_ranges(
            batch_size=batch_size,
            epoch=epoch,
            momentum_buffers=momentum_buffers,
            average=average,
            deadline_seconds=deadline_seconds,
            clock=clock,
            fast_threshold=fast_threshold,
        )
        self._dead_band: tuple[float, float] | None = DEAD_BAND if rebalance else None
        if local_steps.follows_speeds and clock == "wall":
            self._dead_band = 0.0, 0.0
        train_on = train_on or TrainOn()
        self.registry = WorkerRegistry(
            fast_threshold,
            batch_size,
            local_steps.chooses_batches,
            why_no_hosts(weights, train_on),
            num_samples,
        )
        self.planner = self.planner_type(
            PlannerSettings(
                num_samples,
                batch_size,
                step_policy=local_steps,
                local_steps_fast=local_steps_fast or DEFAULT_LOCAL_STEPS,
                sampler=sampler,
                mode=epoch,
                learning_rate=learning_rate,
                momentum_buffers=momentum_buffers,
                deadline_seconds=deadline_seconds,
                seed=seed,
                train_on=train_on,
                selection=selection,
                average=average,
                overlap=overlap,
                keys=Keys(self.arrayrecord_key, self.configrecord_key, self.weighted_by_key),
            )
        )
        self.planner.clock = RunClock(clock)
        check_parts(self.planner.settings, weights, rebalance, clock)
        if average == "gradients":
            check_gradients(self.planner.settings, weights, outer_optimizer)
            self.planner.settings = replace(self.planner.settings, momentum_buffers="average")
        self.averaging = Averaging(weights, outer_optimizer, parameter_names)
        self.connector = Connector(
            self.registry, self.planner, max(self.min_available_nodes, 1), clock
        )
        self.record: RoundRecord | None = None
        """Work, weights and times of the last round, from `aggregate_train` on."""
        self.unevaluated: list[EpochEnd] = []
        """Models whose asynchronous evaluation is not finished."""
        self.round: Round | None = None
        """The current round, from `configure_train` to `aggregate_train`."""
        self.kept_model = KeptModel(self.planner, self.averaging)
        """The model that workers keep while gradients are averaged."""
        self._patience = Patience()
        self._rounds_lost = 0

    def prepare(self, grid: Grid, arrays: ArrayRecord) -> None:
        """Connect workers, measure their speeds if needed, and choose tau_fast if it is "auto".

        `configure_train` calls it before every round. Call it yourself to see the workers before
        training.

        Parameters
        ----------
        grid : Grid
            Any Flower grid.
        arrays : ArrayRecord
            The global model.

        Raises
        ------
        UsageError
            If the workers have different data or models, or one of them cannot take part.
        """
        if self.planner.settings.overlap and not isinstance(grid, MailboxGrid):
            raise UsageError(
                "overlap = true needs workers that stay between rounds: use blsgd run or blsgd "
                'launch, or SuperNodes with transport = "stream"'
            )
        self.connector.refresh(grid)
        if self.planner.settings.step_policy.is_open:
            self.connector.choose_steps(grid, arrays, self.averaging)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one order per worker.

        Queries new nodes for their profiles, and plans the next epoch if one is due.

        Raises
        ------
        UsageError
            If the settings do not fit the workers or the data.
        AggregationError
            If no worker is left, or too few to begin another epoch.
        """
        self.prepare(grid, arrays)
        if self.planner.progress.epoch and self.planner.plan_is_due(self.registry.active):
            self.connector.prepare_epoch(grid)
        began, active = time.perf_counter(), self.registry.active
        if self.planner.plan_is_due(active):
            self.registry.assign_tiers()
            if self._dead_band:
                self.registry.follow_speeds(*self._dead_band)
        round = self.round = self.planner.next_round(server_round, active, arrays)
        round.planning_seconds = time.perf_counter() - began
        slow = [worker for worker in active if not worker.fast]
        if slow and self.planner.settings.train_on.slow_reduce:
            round.slow_reduce = SlowWorkerReduce(grid, slow, self.patience_seconds())
        if self._averages_gradients:
            self.kept_model.complete(round, grid, self.patience_seconds())
        what = "epoch %d, round %d of %d"
        _LOG.info(what, round.epoch, round.round_in_epoch, round.rounds_in_epoch)
        return round.messages(self.averaging.at_nodes, config, self.patience_seconds())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the checked replies by completed load, and record their losses.

        Raises
        ------
        AggregationError
            If no worker succeeded in three rounds in a row, or in the whole budget, or all raised
            UsageError. The round is recorded first, so a resumed run continues with other samples.
        """
        assert self.round is not None, "aggregate_train was called before configure_train"
        round = self.round
        outcomes = round.read(replies)
        arrays, weights = self.averaging.next_model(round, outcomes)
        momentum, is_kept = None, True
        if self._averages_gradients:
            is_kept = self.kept_model.note(round, outcomes, arrays)
        elif self.planner.settings.momentum_buffers == "average":
            momentum = average_momentum(outcomes)
        # `note_round` is last: it may change the speeds and tiers with which the others describe
        # the round. If the run is lost, this is raised when all have recorded the round.
        self.planner.record(outcomes, momentum)
        metrics = average_metrics(outcomes, self.train_metrics_aggr_fn, self.weighted_by_key)
        self._learn_patience(round, outcomes)
        round.end()
        self.record = round_record(round, outcomes, weights)
        self.count_seconds(self.record)
        self.connector.note_round(round, outcomes)
        trained = any(weights) or self.kept_model.skips
        self._rounds_lost = 0 if trained else self._rounds_lost + 1
        if self._is_lost(outcomes) or not is_kept or self.kept_model.skips > MOST_SKIPS:
            none = "a gradient is not finite" if self.kept_model.skips else "no step"
            reasons = "; ".join(
                f"{o.worker.label}: {o.failure.brief if o.failure else none}"
                for o in outcomes
                if not o.load
            )
            raise AggregationError(f"round {server_round}: no worker succeeded ({reasons})")
        return arrays, metrics

    @property
    def _averages_gradients(self) -> bool:
        return self.planner.settings.average == "gradients"

    def settled(self, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """Return the global model after a round; while gradients are averaged, the last known one.

        If the round ended idle, the workers return the model.
        """
        kept = self.kept_model
        if self.idle and any(not worker.fresh for worker, _ in kept.orders):
            return kept.collect(grid, self.patience_seconds())
        return kept.model or arrays if self._averages_gradients else arrays

    def _is_lost(self, outcomes: Sequence[Outcome]) -> bool:
        """Return whether to end: three lost rounds, a budget without training, or all refuse."""
        planner = self.planner
        trained_nothing = not planner.progress.samples_trained and planner.budget_share >= 1
        all_refuse = bool(outcomes) and all(o.failure and o.failure.refused for o in outcomes)
        return self._rounds_lost >= MOST_FAILURES or trained_nothing or all_refuse

    def count_seconds(self, record: RoundRecord) -> None:
        """Count the seconds of a round against the budget; also of rounds before a resumed run."""
        clock = self.planner.clock
        clock.add(record, self.registry.seconds_per_step_alone(clock.clock))

    def patience_seconds(self, most: float = 3600.0) -> float:
        """Return the maximum time to wait for the replies of this round, in seconds.

        This is a multiple of the duration of earlier orders, and at least twice their deadline. It
        is `most` if a worker has its first order, or its first with another batch size, and for
        scripts, which may validate or save between two rounds.
        """
        if self.planner.measures_in_rounds:
            return most
        orders = self.round.orders if self.round else ()
        known = _samples_of(pair for pair in orders if not pair[0].failures_in_a_row)
        patience = self._patience.seconds(known, most, self.registry.restart_seconds)
        return max(patience, 2 * self.planner.settings.deadline_seconds)

    def _learn_patience(self, round: Round, outcomes: list[Outcome]) -> None:
        seconds = round.reply_seconds
        if any(outcome.failure and outcome.failure.kind == "late" for outcome in outcomes):
            # The round lasted too long to learn from, but the other workers have compiled.
            seconds = max((o.report.compute_seconds for o in outcomes if o.report), default=0.0)
        answered = ((o.worker, o.order) for o in outcomes if not o.failure)
        self._patience.learn(seconds, _samples_of(answered))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of FedAvg's evaluation, but only at the end of an epoch.

        Does not wait for nodes. With `fraction_evaluate` < 1, the first connected workers evaluate.
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

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the metrics of FedAvg's evaluation; None if the nodes have no test samples."""
        try:
            return super().aggregate_evaluate(server_round, replies)
        except ZeroDivisionError:  # of the weights
            _LOG.warning("round %d: the evaluations of the nodes have no examples", server_round)
            return None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Train for a number of rounds with Flower's own loop; see Flower's `Strategy.start`.

        The budget of the learning rate schedule is `num_rounds`.
        """
        if self._averages_gradients:
            raise UsageError(
                'average = "gradients" needs a loop that collects the model; use rounds or fit'
            )
        self.planner.budget = Budget(rounds=num_rounds)
        configs = train_config, evaluate_config
        return super().start(grid, initial_arrays, num_rounds, timeout, *configs, evaluate_fn)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts as plain values and arrays, for a checkpoint."""
        outer = self.averaging.outer_optimizer
        return {
            "planner": self.planner.state_dict(),
            "registry": self.registry.state_dict(),
            "weighting": self.averaging.weighting.state_dict(),
            "outer-optimizer": outer.state_dict() if outer else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, before the first round; ValueError if it does not fit the settings.

        Workers are recognized when they connect. A worker on the same device keeps its speed.
        """
        outer = self.averaging.outer_optimizer
        self.registry.load_state_dict(state["registry"])
        self.planner.load_state_dict(state["planner"], self.registry.workers)
        self.averaging.weighting.load_state_dict(state["weighting"])
        if outer:
            outer.load_state_dict(state["outer-optimizer"])
        elif state["outer-optimizer"]:
            raise ValueError("it has the state of an outer optimizer, but this run has none")


def _samples_of(orders: Iterable[tuple[Worker, TrainOrder]]) -> dict[tuple[Address, int], int]:
    """Return the number of samples in the orders, by worker and batch size."""
    return {(w.address, order.batch_size): len(order.indices) for w, order in orders}
