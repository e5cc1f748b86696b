"""The training loop: rounds until a budget is used up."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import FedAvg, Result

from .budget import Budget
from .planner import Planner
from .round_metrics import RoundRecord

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
        The new global model.
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

    `record` is that of the last round; None before its models are averaged.
    """

    planner: Planner
    record: RoundRecord | None
    patience_seconds: Callable[[float], float]

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

        The workers wait while the caller handles a round.

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
        over = ""
        while not over:
            server_round += 1
            error = None
            orders = self.configure_train(server_round, arrays, config, grid)
            measures_speeds = planner.measured is not None
            replies = grid.send_and_receive(orders, timeout=self.patience_seconds(timeout))
            try:
                averaged, metrics = self.aggregate_train(server_round, replies)
                assert averaged is not None
                arrays = averaged
            except AggregationError as raised:
                error, metrics = raised, None
            del orders, replies  # frees shared memory for the next round
            if self.record is None:  # raised by a subclass
                assert error is not None, "a subclass has to call aggregate_train of its parent"
                raise error
            over = budget.used_up(planner.used, planner.epoch_ended)
            yield RoundEnd(
                server_round,
                planner.progress.epoch,
                arrays,
                metrics or MetricRecord(),
                self.record,
                planner.epoch_ended,
                over,
                measures_speeds,
                error,
            )
            if error is not None:
                raise error

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
