"""The training loop: rounds until a budget is used up."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import FedAvg, Result

from ..engines.mailbox import MailboxGrid
from .budget import Budget
from .planner import Planner
from .round import Round
from .round_metrics import RoundRecord
from .workers import WorkerRegistry

_LOG = logging.getLogger("flwr")  # progress is shown at the level of Flower's own strategies

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True)
class RoundEnd:
    """End of a round.

    Parameters
    ----------
    round, epoch : int
        Both counted from 1.
    arrays : ArrayRecord
        The new global model. With ``average = "gradients"``, if the round did not end idle, an
        older one: the last that the workers have returned.
    metrics : MetricRecord
        Average of the workers' metrics.
    record : RoundRecord
        Work, weight and times of each worker.
    epoch_ended : bool
        Whether this was the last round of the epoch.
    over : str
        Limit of the budget that is reached, such as ``"3 of 3 epochs done"``; else empty. The loop
        ends after this round.
    measures_speeds : bool (default: False)
        Whether the round measured unknown speeds, as the first rounds of scripts do.
    error : AggregationError, optional
        Raised when the loop continues, because too many rounds were lost; the model is unchanged.
    idle : bool (default: True)
        Whether the workers wait. Otherwise they compute the next round already.
    """

    round: int
    epoch: int
    arrays: ArrayRecord
    metrics: MetricRecord
    record: RoundRecord
    epoch_ended: bool
    over: str
    measures_speeds: bool = False
    error: AggregationError | None = None
    idle: bool = True


@dataclass(frozen=True)
class EpochEnd:
    """End of an epoch.

    Parameters
    ----------
    epoch, round : int
        Both counted from 1.
    arrays : ArrayRecord
        The global model.
    metrics : MetricRecord, optional
        Result of the evaluation; None if there was none.
    late : bool (default: False)
        Whether this is a late result: only `metrics`, from an async evaluation, are new.
    busy_seconds : float (default: 0)
        Computing time of the workers with ``role=evaluate``.
    """

    epoch: int
    round: int
    arrays: ArrayRecord
    metrics: MetricRecord | None = None
    late: bool = False
    busy_seconds: float = 0.0


class TrainingLoop(FedAvg):
    """The two loops of `BiasedLocalSGD` over its hooks `configure_train` and `aggregate_train`.

    `round` is the last one whose orders were made, and `record` that of the last one whose models
    were averaged. `idle` tells whether the last round ended idle; True before the first one.
    """

    planner: Planner
    registry: WorkerRegistry
    round: Round | None
    record: RoundRecord | None
    patience_seconds: Callable[[float], float]
    settled: Callable[[ArrayRecord, Grid], ArrayRecord]
    idle = True
    _pauses = False

    def pause(self) -> None:
        """Let the round that is under way end idle; the next one if the workers wait already."""
        self._pauses = True

    def rounds(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        budget: Budget,
        *,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        start_round: int = 0,
    ) -> Iterator[RoundEnd]:
        """Train round by round until the budget is used up, or the caller leaves the loop.

        On grids that can send without waiting (local, streams), the next round begins before the
        caller gets the end of the last one, unless another epoch has to be planned; see
        `RoundEnd.idle` and `pause`. Its replies are dropped if the caller then leaves the loop.

        Parameters
        ----------
        grid : Grid
            Any Flower grid.
        arrays : ArrayRecord
            The initial global model.
        budget : Budget
            The first limit that is reached ends the loop. Learning rate schedules follow it.
        timeout : float (default: 3600)
            Maximum time to wait for the replies of a round, in seconds. After the first round it is
            a multiple of earlier rounds (`patience_seconds`).
        train_config : ConfigRecord, optional
            Sent with every order; the keys of the order take precedence.
        start_round : int (default: 0)
            Last completed round of a resumed run, whose state is in the strategy and `arrays`.

        Yields
        ------
        RoundEnd
            One per round.

        Raises
        ------
        UsageError
            If the settings do not fit the workers or the data.
        AggregationError
            If no worker succeeded in three rounds in a row, or too few workers are left.
        """
        self.summary()
        planner, config, server_round = self.planner, train_config or ConfigRecord(), start_round
        planner.budget = budget
        over, self.idle, sent = "", True, None
        try:
            while not over:
                server_round += 1
                if sent is None:
                    sent = self._send(server_round, arrays, config, grid)
                planner.prepare(server_round + 1)  # while the workers compute
                measures_speeds, self.record = planner.measured is not None, None
                replies = self._receive(sent, self.patience_seconds(timeout), grid)
                sent, error = None, None
                try:
                    averaged, metrics = self.aggregate_train(server_round, replies)
                    assert averaged is not None
                    arrays = averaged
                except AggregationError as raised:
                    error, metrics = raised, None
                del replies  # frees shared memory for the next round
                if self.record is None:  # raised by a subclass
                    assert error is not None, "a subclass has to call aggregate_train of its parent"
                    raise error
                record = self.record
                failure: Exception | None = error
                over = budget.used_up(planner.used, planner.epoch_ended)
                self.idle = bool(error or over) or not self._can_send_ahead(grid)
                if not self.idle:
                    try:
                        sent = self._send(server_round + 1, arrays, config, grid)
                    except Exception as unsent:  # raised after the end of this round
                        self.idle, failure = True, unsent
                model = self.settled(arrays, grid)
                arrays = model if self.idle else arrays
                yield RoundEnd(
                    server_round,
                    planner.progress.epoch,
                    model,
                    metrics or MetricRecord(),
                    record,
                    planner.epoch_ended,
                    over,
                    measures_speeds,
                    error,
                    self.idle,
                )
                if failure is not None:
                    raise failure
        finally:
            if isinstance(grid, MailboxGrid) and isinstance(sent, Mapping):
                grid.forget(sent)

    def _can_send_ahead(self, grid: Grid) -> bool:
        """Return whether the next round can be sent now: it is planned, and no pause is due."""
        pauses = self._pauses and not self.planner.ahead  # else first a round that ends idle
        self._pauses = self._pauses and not pauses
        if pauses or not isinstance(grid, MailboxGrid) or self.planner.epoch_ended:
            return False
        online = set(grid.get_node_ids())
        active = [worker for worker in self.registry.active if worker.node_id in online]
        return not (self.planner.plan_is_due(active) or self.planner.rest_is_due)

    def _send(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Mapping[str, int] | list[Message]:
        """Send the orders of a round; return their nodes, or the orders if the grid has to wait."""
        self.planner.pauses = self._pauses
        ended = self.round.ended_on_clock if self.round and not self.idle else 0.0
        orders = self.configure_train(server_round, arrays, config, grid)
        if ended and self.round:
            self.round.planning_seconds = self.round.sent_on_clock - ended
        return grid.send(orders) if isinstance(grid, MailboxGrid) else list(orders)

    def _receive(
        self, sent: Mapping[str, int] | list[Message], seconds: float, grid: Grid
    ) -> Iterable[Message]:
        if isinstance(sent, list):
            return grid.send_and_receive(sent, timeout=seconds)
        assert isinstance(grid, MailboxGrid)
        assert self.round is not None
        replies, self.round.unread_seconds = grid.receive(sent, seconds)
        return replies

    def fit(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        *,
        epochs: int | None = None,
        seconds: float | None = None,
        rounds: int | None = None,
        samples: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        evaluate_every_epochs: int = 1,
        on_epoch: Callable[[EpochEnd], bool | None] | None = None,
    ) -> Result:
        """Train until the budget is used up; `rounds` is the same as a loop.

        Parameters
        ----------
        grid, initial_arrays, timeout, train_config
            As for `rounds`.
        epochs : int, optional
            Number of epochs, > 0.
        seconds : float, optional
            Training time in seconds, > 0, without evaluation; the round in which it ends is
            completed.
        rounds, samples : int, optional
            Number of rounds, and of samples trained on, > 0. At least one limit is needed; the
            first one that is reached ends the run.
        evaluate_fn : callable, optional
            ``(server_round, arrays) -> MetricRecord``, as for Flower's `start`; called at the end
            of an epoch.
        evaluate_every_epochs : int (default: 1)
            Number of epochs between evaluations; the final model is always evaluated.
        on_epoch : callable, optional
            Called with an EpochEnd after its evaluation, while the workers wait. It may return True
            to stop.

        Returns
        -------
        flwr.serverapp.strategy.Result
            The model, and the metrics by round.

        Raises
        ------
        ValueError
            If there is no limit, or one is not above 0.
        UsageError, AggregationError
            As for `rounds`.
        """
        budget = Budget.of(epochs=epochs, seconds=seconds, rounds=rounds, samples=samples)
        result = Result(arrays=initial_arrays)
        loop = self.rounds(grid, initial_arrays, budget, timeout=timeout, train_config=train_config)
        for end in loop:
            if end.error:
                continue  # and the loop raises it
            result.arrays = end.arrays
            result.train_metrics_clientapp[end.round] = end.metrics
            if not (end.epoch_ended or end.over):
                continue
            epoch_end = EpochEnd(end.epoch, end.round, end.arrays)
            if evaluate_fn and (end.over or end.epoch % evaluate_every_epochs == 0):
                epoch_end = replace(epoch_end, metrics=evaluate_fn(end.round, end.arrays))
            if epoch_end.metrics is not None:
                result.evaluate_metrics_serverapp[end.round] = epoch_end.metrics
                _LOG.info("epoch %d: %s", end.epoch, epoch_end.metrics)
            if on_epoch and on_epoch(epoch_end):
                break
        return result
