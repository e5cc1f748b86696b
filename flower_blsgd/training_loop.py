"""The loop of `BiasedLocalSGD.fit`: epochs or seconds, with evaluation outside the timed part."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from .background import TellingWhenSent
from .round_log import RoundRecord

if TYPE_CHECKING:
    from .strategy import BiasedLocalSGD

_LOG = logging.getLogger("flwr")


class LateMetrics(Protocol):
    """What an evaluation that goes on beside the training will say."""

    def done(self) -> bool:
        """Return whether `result` returns at once."""
        ...

    def result(self) -> MetricRecord | None:
        """Wait for the metrics, and return them."""
        ...


EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | LateMetrics | None]


@dataclass(frozen=True)
class EpochEnd:
    """An epoch that is over.

    Parameters
    ----------
    epoch, round : int
        Both counted from 1.
    arrays : ArrayRecord
        The global model.
    metrics : MetricRecord, optional
        What `evaluate_fn` returned; None if it was not asked after this epoch, or they are late.
    late : LateMetrics, optional
        Where they will come from, if they are late.
    """

    epoch: int
    round: int
    arrays: ArrayRecord
    metrics: MetricRecord | None
    late: LateMetrics | None = None


def fit(
    strategy: "BiasedLocalSGD",
    grid: Grid,
    initial_arrays: ArrayRecord,
    *,
    epochs: int | None = None,
    seconds: float | None = None,
    seconds_of: Callable[[RoundRecord], float] | None = None,
    should_stop: Callable[[int, Result], bool] | None = None,
    first_round: int = 1,
    timeout: float = 3600,
    train_config: ConfigRecord | None = None,
    evaluate_fn: EvaluateFn | None = None,
    evaluate_every_epochs: int = 1,
    on_round: Callable[[RoundRecord], None] | None = None,
    on_epoch: Callable[[EpochEnd], None] | None = None,
    on_sent: Callable[[], None] | None = None,
) -> Result:
    """Train until the budget is used up.

    Parameters
    ----------
    strategy : BiasedLocalSGD
        Its hooks do the work.
    grid : Grid
        Any Flower grid.
    initial_arrays : ArrayRecord
        The global model to begin with.
    epochs : int, optional
        Stop after this many, >= 1.
    seconds : float, optional
        Stop after the round in which this much training time is over, > 0. Evaluation does not
        count. At least one of `epochs` and `seconds` is needed.
    seconds_of : callable, optional
        What a round counts of these seconds; by default its planning and its duration.
    should_stop : callable, optional
        ``(server_round, result) -> bool``, asked after every round.
    first_round : int (default: 1)
        The number of the first round.
    timeout : float (default: 3600)
        Seconds to wait for the replies of one round.
    train_config : ConfigRecord, optional
        Sent along with every order; an order's own keys win.
    evaluate_fn : callable, optional
        ``(server_round, arrays) -> MetricRecord``, as for Flower's `start`. It may return
        `LateMetrics` instead: training goes on, and they are waited for at the end.
    evaluate_every_epochs : int (default: 1)
        Ask it after every so many epochs, and always at the end.
    on_round, on_epoch : callable, optional
        Called with a RoundRecord, and with an EpochEnd after its evaluation. The workers wait
        meanwhile.
    on_sent : callable, optional
        Called without arguments when a round's orders are on their way: what it does, it does
        while the workers compute.

    Returns
    -------
    flwr.serverapp.strategy.Result
        The model and the metrics by round.

    Raises
    ------
    ValueError
        If there is no budget, or it is not above 0.
    UsageError
        If the settings do not fit the workers or the data.
    AggregationError
        If a round had no usable reply.
    """
    if epochs is None and seconds is None:
        raise ValueError("fit needs a budget: give epochs=, seconds=, or both")
    for name, value in (("epochs", epochs), ("seconds", seconds)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} = {value} must be above 0")
    planner = strategy.planner
    training_seconds = 0.0

    def budget_share() -> float:
        by_epochs = (planner.epoch - 1) / epochs if epochs else 0.0
        return max(by_epochs, training_seconds / seconds if seconds else 0.0)

    def count(record: RoundRecord) -> None:
        nonlocal training_seconds
        if on_round is not None:
            on_round(record)
        if seconds_of is not None:
            training_seconds += seconds_of(record)
        else:
            training_seconds += record.planning_seconds + record.round_seconds

    def sent() -> None:
        planner.readers.begin()
        if on_sent is not None:
            on_sent()

    planner.budget_share = budget_share
    planner.last_epoch = epochs
    strategy.on_round = count
    strategy.summary()
    result = Result(arrays=initial_arrays)
    config = train_config or ConfigRecord()
    evaluations = _Evaluations(result)
    server_round = first_round
    while True:
        orders = TellingWhenSent(
            strategy.configure_train(server_round, result.arrays, config, grid), sent
        )
        replies = grid.send_and_receive(orders, timeout=timeout)
        arrays, metrics = strategy.aggregate_train(server_round, replies)
        del orders, replies  # they may hold shared memory that the next round can use
        assert arrays is not None
        assert metrics is not None
        result.arrays = arrays
        result.train_metrics_clientapp[server_round] = metrics
        over = (
            (epochs is not None and planner.epoch_ended and planner.epoch >= epochs)
            or (seconds is not None and training_seconds >= seconds)
            or (should_stop is not None and should_stop(server_round, result))
        )
        if planner.epoch_ended or over:
            evaluated = None
            if evaluate_fn and (over or planner.epoch % evaluate_every_epochs == 0):
                evaluated = evaluate_fn(server_round, arrays)
            evaluations.add(planner.epoch, server_round, evaluated)
            if on_epoch is not None:
                on_epoch(_epoch_end(planner.epoch, server_round, arrays, evaluated))
        if over:
            evaluations.take(wait=True)
            return result
        server_round += 1


def _epoch_end(
    epoch: int,
    server_round: int,
    arrays: ArrayRecord,
    evaluated: MetricRecord | LateMetrics | None,
) -> EpochEnd:
    if evaluated is None or isinstance(evaluated, MetricRecord):
        return EpochEnd(epoch, server_round, arrays, evaluated)
    return EpochEnd(epoch, server_round, arrays, None, evaluated)


class _Evaluations:
    """Writes metrics into a result in the order of the epochs, also those that come late."""

    def __init__(self, result: Result) -> None:
        self._result = result
        self._pending: deque[tuple[int, int, MetricRecord | LateMetrics]] = deque()

    def add(
        self, epoch: int, server_round: int, evaluated: MetricRecord | LateMetrics | None
    ) -> None:
        """Take what an evaluation returned."""
        if evaluated is not None:
            self._pending.append((epoch, server_round, evaluated))
        self.take(wait=False)

    def take(self, wait: bool) -> None:
        """Write down what is known; wait for all of it or not."""
        while self._pending:
            epoch, server_round, evaluated = self._pending[0]
            if isinstance(evaluated, MetricRecord):
                metrics: MetricRecord | None = evaluated
            elif wait or evaluated.done():
                metrics = evaluated.result()
            else:
                return
            self._pending.popleft()
            if metrics is not None:
                self._result.evaluate_metrics_serverapp[server_round] = metrics
                _LOG.info("epoch %d: %s", epoch, metrics)
