"""`BiasedLocalSGD.start` under later releases of Flower, whose `start` takes more arguments."""

from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from flower_blsgd import BiasedLocalSGD

from .in_process_grid import InProcessGrid, ToyWorker, fast_profile, slow_profile, toy_arrays


def start_of_143(  # the loop of Flower 1.43, as its release notes describe it
    self: FedAvg,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int = 3,
    timeout: float = 3600,
    train_config: ConfigRecord | None = None,
    should_stop: Callable[[int, Result], bool] | None = None,
) -> Result:
    result = Result(arrays=initial_arrays)
    for server_round in range(1, num_rounds + 1):
        config = train_config or ConfigRecord()
        orders = self.configure_train(server_round, result.arrays, config, grid)
        replies = grid.send_and_receive(orders, timeout=timeout)
        arrays, metrics = self.aggregate_train(server_round, replies)
        result.arrays, result.train_metrics_clientapp[server_round] = arrays, metrics
        if should_stop is not None and should_stop(server_round, result):
            break
    return result


def started(**arguments: Any) -> Result:
    """Start a strategy whose epoch of 24 samples has 4 rounds."""
    grid = InProcessGrid({10: ToyWorker(fast_profile(0)), 20: ToyWorker(slow_profile(1))})
    settings = {"batch_size": 2, "local_steps": 2, "local_steps_slow": 1}
    strategy = BiasedLocalSGD(24, fraction_evaluate=0.0, **settings)
    return strategy.start(grid, toy_arrays(), **arguments)


def test_arguments_of_later_releases_reach_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAvg, "start", start_of_143)
    asked = []

    def should_stop(server_round: int, result: Result) -> bool:
        asked.append(server_round)
        return server_round == 3

    result = started(num_rounds=8, timeout=5, should_stop=should_stop)
    assert asked == list(result.train_metrics_clientapp) == [1, 2, 3]


def test_arguments_that_flower_does_not_know_are_refused_by_flower() -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        started(no_such_argument=1)
