"""The ClientApp: a step that depends on the node and the round, and a lock on its device."""

import fcntl
import functools
import os
import time
from pathlib import Path
from typing import IO

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import flower_blsgd

app = ClientApp()
flower_blsgd.serve_sessions(app)


@functools.cache
def device(notes: str, partition: int) -> IO[str]:
    """Hold this node's device until the process ends; fail if another process holds it."""
    file = (Path(notes) / f"device-{partition}").open("w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take a step, for as long as the config says."""
    config = context.run_config
    partition = int(context.node_config["partition-id"])
    device(str(config["notes"]), partition)
    count = context.state.config_records.setdefault("calls", ConfigRecord({"n": 0}))
    count["n"] += 1
    deadline = time.monotonic() + float(config["seconds"])
    while time.monotonic() < deadline:
        time.sleep(0.01)
    rng = np.random.default_rng([partition, count["n"]])
    arrays = {
        name: array.numpy() + 0.1 * rng.standard_normal(array.shape, np.float32)
        for name, array in message.content["arrays"].items()
    }
    metrics = MetricRecord(
        {
            "num-examples": 10 + partition,
            "partition": partition,
            "process": os.getpid(),
            "calls": count["n"],
        }
    )
    content = RecordDict(
        {
            "arrays": ArrayRecord({name: Array(array) for name, array in arrays.items()}),
            "metrics": metrics,
        }
    )
    return Message(content, reply_to=message)
