"""Nodes with several devices whose workers are functions, for tests without processes."""

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.hosts.several_devices import answer
from flower_blsgd.strategy.round_metrics import RoundRecord

from ..in_process_grid import Handler, InProcessGrid


class HostNode:
    """A node that is one grid of functions; a handler of an `InProcessGrid`."""

    def __init__(self, *handlers: Handler, **node_config: Any) -> None:
        self.grid = InProcessGrid({100 + rank: h for rank, h in enumerate(handlers)})
        self._node_config = {key.replace("_", "-"): value for key, value in node_config.items()}

    def __call__(self, message: Message, node_id: int) -> Message:
        context = Context(1, node_id, self._node_config, RecordDict(), {})
        return answer(message, context, self.grid)


def play(
    strategy: BiasedLocalSGD, grid: Grid, arrays: ArrayRecord, rounds: int = 1
) -> tuple[ArrayRecord, list[RoundRecord]]:
    """Return the model after some rounds, and the records of these."""
    records: list[RoundRecord] = []
    for server_round in range(1, rounds + 1):
        orders = strategy.configure_train(server_round, arrays, ConfigRecord({"own": 7}), grid)
        found, metrics = strategy.aggregate_train(server_round, grid.send_and_receive(orders))
        assert found is not None
        assert strategy.record is not None
        records.append(strategy.record)
        assert metrics is not None
        arrays = found
    return arrays, records
