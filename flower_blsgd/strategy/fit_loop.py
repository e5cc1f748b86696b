"""`BiasedLocalSGD.fit`: training until the budget is used up."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from .budget import Budget
from .round_metrics import RoundRecord

if TYPE_CHECKING:
    from .biased_local_sgd import BiasedLocalSGD
    from .evaluation import WorkerEvaluation

_LOG = logging.getLogger("flwr")  # progress is shown at the level of Flower's own strategies

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


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


def fit(
    strategy: "BiasedLocalSGD",
    grid: Grid,
    initial_arrays: ArrayRecord,
    *,
    epochs: int | None = None,
    seconds: float | None = None,
    rounds: int | None = None,
    samples: int | None = None,
    budget_seconds: Callable[[], float] | None = None,
    should_stop: Callable[[int, Result], bool] | None = None,
    timeout: float = 3600,
    train_config: ConfigRecord | None = None,
    evaluate_fn: EvaluateFn | None = None,
    evaluate_every_epochs: int = 1,
    async_evaluation: "WorkerEvaluation | None" = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    on_epoch: Callable[[EpochEnd], bool | None] | None = None,
    between_rounds: Callable[[int, ArrayRecord], None] | None = None,
    start_round: int = 0,
    evaluate_first: bool = False,
) -> Result:
    """Train until the budget is used up.

    Parameters
    ----------
    grid : Grid
        Any Flower grid.
    initial_arrays : ArrayRecord
        The initial global model.
    epochs : int, optional
        Number of epochs, > 0.
    seconds : float, optional
        Training time in seconds, > 0, without evaluation; the round in which it ends is completed.
    rounds, samples : int, optional
        Number of rounds, and of samples trained on, > 0. At least one limit is needed; the first
        one that is reached ends the run.
    budget_seconds : callable, optional
        Returns the used seconds of the budget; called after `on_round`. By default, they are the
        sum of the planning and round times of this call.
    should_stop : callable, optional
        ``(server_round, result) -> bool``, called after every round.
    timeout : float (default: 3600)
        Maximum time to wait for the replies of a round, in seconds. After the first round it is a
        multiple of earlier rounds (`BiasedLocalSGD.patience_seconds`).
    train_config : ConfigRecord, optional
        Sent with every order; the keys of the order take precedence.
    evaluate_fn : callable, optional
        ``(server_round, arrays) -> MetricRecord``, as for Flower's `start`.
    evaluate_every_epochs : int (default: 1)
        Number of epochs between evaluations; the final model is always evaluated.
    async_evaluation : WorkerEvaluation, optional
        Workers with ``role=evaluate`` evaluate while the others train. `evaluate_fn` is called if
        they fail, and at the end of the run, when unfinished evaluations are dropped.
    on_round, on_epoch : callable, optional
        Called with a RoundRecord, and with an EpochEnd after its evaluation, while the workers
        wait. `on_epoch` may return True to stop. With `async_evaluation` it is called at the end of
        the epoch without metrics, and again, with ``late``, when they have arrived.
    between_rounds : callable, optional
        ``(server_round, arrays)``, called after every round, before an evaluation.
    start_round : int (default: 0)
        Last completed round of a resumed run, whose state is in `strategy` and `initial_arrays`.
    evaluate_first : bool (default: False)
        Whether to evaluate before training, because a resumed run ended before its evaluation.

    Returns
    -------
    flwr.serverapp.strategy.Result
        The model, and the metrics by round.

    Raises
    ------
    ValueError
        If there is no limit, or one is not above 0.
    UsageError
        If the settings do not fit the workers or the data.
    AggregationError
        If no worker succeeded in three rounds in a row, or too few workers are left.
    """
    budget = Budget.of(epochs=epochs, seconds=seconds, rounds=rounds, samples=samples)
    planner, training_seconds = strategy.planner, 0.0
    used_seconds = budget_seconds or (lambda: training_seconds)

    def ended() -> bool:
        used_up = budget.used_up(planner.used(used_seconds()), planner.epoch_ended)
        return bool(used_up or (should_stop and should_stop(server_round, result)))

    def count(record: RoundRecord) -> None:
        nonlocal training_seconds
        training_seconds += record.planning_seconds + record.round_seconds
        if on_round is not None:
            on_round(record)

    def end_epoch(over: bool) -> bool:
        """Evaluate the model if due, and return whether the run is over."""
        end = EpochEnd(planner.epoch, server_round, result.arrays)
        due = over or planner.epoch % evaluate_every_epochs == 0
        if due and (over or not (async_evaluation and async_evaluation.begin(end))) and evaluate_fn:
            end = replace(end, metrics=evaluate_fn(server_round, result.arrays))
        if over:
            note(_late_result(async_evaluation, None))
        return note(end) or over

    def note(end: EpochEnd | None) -> bool:
        """Report an epoch or a late result, and return whether to stop."""
        if end and end.metrics is not None:
            result.evaluate_metrics_serverapp[end.round] = end.metrics
            _LOG.info("epoch %d: %s", end.epoch, end.metrics)
        return bool(end and on_epoch and on_epoch(end))

    planner.budget_share = lambda: budget.share(planner.used(used_seconds()))
    strategy.on_round = count
    strategy.summary()
    result = Result(arrays=initial_arrays)
    config = train_config or ConfigRecord()
    server_round = start_round
    over = evaluate_first and end_epoch(ended())
    while not over:
        server_round += 1
        orders = strategy.configure_train(server_round, result.arrays, config, grid)
        replies = grid.send_and_receive(orders, timeout=strategy.patience_seconds(timeout))
        arrays, metrics = strategy.aggregate_train(server_round, replies)
        del orders, replies  # frees shared memory for the next round
        assert arrays is not None
        assert metrics is not None
        result.arrays = arrays
        result.train_metrics_clientapp[server_round] = metrics
        over = ended()
        if between_rounds is not None:
            between_rounds(server_round, arrays)
        over = over or note(_late_result(async_evaluation, evaluate_fn))
        if planner.epoch_ended or over:
            over = end_epoch(over)
    return result


def _late_result(
    evaluation: "WorkerEvaluation | None", instead: EvaluateFn | None
) -> EpochEnd | None:
    """Return the result of an async evaluation that has ended, or None.

    `instead` evaluates the model if the workers failed. None means the end of the run: unfinished
    evaluations are dropped.
    """
    if evaluation is None:
        return None
    end = evaluation.take()
    metrics = end and end.metrics
    if end and instead:
        metrics = metrics or instead(end.round, end.arrays)
        evaluation.finish()
    elif not instead:
        evaluation.unevaluated.clear()
    return replace(end, metrics=metrics, late=True) if end and metrics else None
