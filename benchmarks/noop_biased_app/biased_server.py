"""A ServerApp that runs rounds of BiasedLocalSGD and writes how long each took."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flower_blsgd import BiasedLocalSGD, Budget

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, without a log line each."""
    config = context.run_config
    ends = np.linspace(0, int(config["parameters"]), int(config["tensors"]) + 1, dtype=int)
    sizes = np.diff(ends)
    arrays = ArrayRecord({f"{i}": Array(np.ones(n, np.float32)) for i, n in enumerate(sizes)})
    nodes = int(config["min-nodes"])
    strategy = BiasedLocalSGD(
        int(config["samples"]),
        int(config["batch-size"]),
        int(config["local-steps"]),
        local_steps_slow=1,
        min_available_nodes=nodes,
    )
    rounds = int(config["rounds"])
    ended = [time.perf_counter()]
    for _ in strategy.rounds(grid, arrays, Budget(rounds=rounds)):
        ended.append(time.perf_counter())
    Path(str(config["out"])).write_text(json.dumps({"round": np.diff(ended).tolist()}))
