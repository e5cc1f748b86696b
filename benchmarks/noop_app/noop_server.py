"""A ServerApp that runs rounds of Flower's own FedAvg and writes how long each took."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import flower_blsgd

app = ServerApp()


class TimedFedAvg(FedAvg):
    """FedAvg that notes when each round began and ended."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seconds: list[float] = []
        self.engine_seconds: list[float] = []

    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        """Begin a round."""
        self.began = time.perf_counter()
        messages = list(super().configure_train(*arguments))
        self.sent = time.perf_counter()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """End a round."""
        replies = list(replies)
        self.engine_seconds.append(time.perf_counter() - self.sent)
        averaged = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self.began)
        return averaged


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    ends = np.linspace(0, int(config["parameters"]), int(config["tensors"]) + 1, dtype=int)
    sizes = np.diff(ends)
    arrays = ArrayRecord({f"{i}": Array(np.ones(n, np.float32)) for i, n in enumerate(sizes)})
    strategy = TimedFedAvg(
        fraction_evaluate=0.0, min_available_nodes=int(config["min-nodes"]), min_train_nodes=2
    )
    with flower_blsgd.stream(grid, context) as streams:
        strategy.start(streams, arrays, num_rounds=int(config["rounds"]))
    Path(str(config["out"])).write_text(
        json.dumps({"round": strategy.seconds, "engine": strategy.engine_seconds})
    )
