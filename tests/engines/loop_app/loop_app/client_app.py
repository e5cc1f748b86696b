"""The ClientApp: it locks its node's device, and says which process answers."""

import fcntl
import functools
import os
import time
from pathlib import Path
from typing import IO

from flwr.app import Context, Message, MetricRecord, RecordDict
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
    """Work for a moment."""
    partition = int(context.node_config["partition-id"])
    device(str(context.run_config["notes"]), partition)
    time.sleep(0.2)
    metrics = MetricRecord({"partition": partition, "process": os.getpid()})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
