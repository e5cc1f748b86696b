"""The ServerApp: one of Flower's own strategies, three rounds."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp, strategy

from .task import make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and write what came out if a file is named."""
    random.seed(5)  # the strategy samples nodes: sums in the same order are the same to the bit
    config = context.run_config
    kind = getattr(strategy, str(config["strategy"]))
    chosen = kind(
        fraction_train=1.0,
        fraction_evaluate=1.0,
    )
    result = chosen.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_model().state_dict()),
        train_config=ConfigRecord({"lr": config["lr"]}),
        evaluate_config=ConfigRecord({"scale": 2.0}),
        num_rounds=int(config["num-server-rounds"]),
    )
    if config["result"]:
        write(Path(str(config["result"])), result)


def write(file: Path, result: strategy.Result) -> None:
    """Write the final model, and the metrics of all rounds beside it."""
    np.savez(file, **{name: array.numpy() for name, array in result.arrays.items()})
    metrics = {
        "train": {r: dict(m) for r, m in result.train_metrics_clientapp.items()},
        "evaluate": {r: dict(m) for r, m in result.evaluate_metrics_clientapp.items()},
    }
    file.with_suffix(".json").write_text(json.dumps(metrics, sort_keys=True))
    assert torch.is_tensor(result.arrays.to_torch_state_dict()["0.weight"])
