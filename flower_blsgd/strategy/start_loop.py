"""Flower's loop of `Strategy.start`, with an early end."""

import logging
from collections.abc import Callable

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from .fit_loop import EvaluateFn

_LOG = logging.getLogger("flwr")  # progress is shown at the level of Flower's own strategies


def start_until(
    strategy: FedAvg,
    should_stop: Callable[[int, Result], bool],
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int,
    timeout: float,
    train_config: ConfigRecord | None,
    evaluate_config: ConfigRecord | None,
    evaluate_fn: EvaluateFn | None,
) -> Result:
    """Run Flower's rounds until `should_stop` returns True after one of them.

    Flower's own loop has no such argument before version 1.43.
    """
    strategy.summary()
    result = Result(arrays=initial_arrays)

    def evaluate_centrally(server_round: int) -> None:
        metrics = evaluate_fn(server_round, result.arrays) if evaluate_fn else None
        if metrics is not None:
            _LOG.info("round %d: %s", server_round, metrics)
            result.evaluate_metrics_serverapp[server_round] = metrics

    evaluate_centrally(0)
    train_config = train_config or ConfigRecord()
    evaluate_config = evaluate_config or ConfigRecord()
    for server_round in range(1, num_rounds + 1):
        _LOG.info("round %d of %d", server_round, num_rounds)
        orders = strategy.configure_train(server_round, result.arrays, train_config, grid)
        replies = grid.send_and_receive(orders, timeout=timeout)
        arrays, metrics = strategy.aggregate_train(server_round, replies)
        if arrays is not None:
            result.arrays = arrays
        if metrics is not None:
            result.train_metrics_clientapp[server_round] = metrics
        del orders, replies  # frees shared memory for the evaluation
        tests = strategy.configure_evaluate(server_round, result.arrays, evaluate_config, grid)
        answers = grid.send_and_receive(tests, timeout=timeout)
        metrics = strategy.aggregate_evaluate(server_round, answers)
        if metrics is not None:
            result.evaluate_metrics_clientapp[server_round] = metrics
        evaluate_centrally(server_round)
        if should_stop(server_round, result):
            _LOG.info("should_stop ended the run after round %d", server_round)
            break
    return result
