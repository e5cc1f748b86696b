"""The ServerApp: FedAvg for some rounds, or a plain loop until it is told to end, with notes."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import flower_blsgd

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and write what came out."""
    notes = Path(str(context.run_config["notes"]))
    arrays = ArrayRecord([np.zeros((300, 10), np.float32), np.zeros(7, np.float32)])
    with flower_blsgd.stream(grid, context) as fast:
        if context.run_config["loop"]:
            loop(fast, arrays, notes)
        else:
            strategy = FedAvg(fraction_evaluate=0.0)
            rounds = int(context.run_config["rounds"])
            begin = time.monotonic()
            result = strategy.start(fast, arrays, num_rounds=rounds)
            note(notes, seconds=time.monotonic() - begin, transports=transports(fast))
            np.savez(notes / "result.npz", **{k: a.numpy() for k, a in result.arrays.items()})
        note(notes, at=time.time(), done=True)


def loop(grid: Grid, arrays: ArrayRecord, notes: Path) -> None:
    """Send a message to every node that is there, again and again."""
    while not (notes / "enough").exists():
        begin = time.monotonic()
        messages = [
            Message(RecordDict({"arrays": arrays, "config": ConfigRecord()}), node_id, "train")
            for node_id in grid.get_node_ids()
        ]
        replies = list(grid.send_and_receive(messages, timeout=30))
        note(
            notes,
            at=time.time(),
            seconds=time.monotonic() - begin,
            sent=len(messages),
            partitions=[r.content["metrics"]["partition"] for r in replies if r.has_content()],
            processes=[r.content["metrics"]["process"] for r in replies if r.has_content()],
            errors=[str(r.error.reason) for r in replies if r.has_error()],
        )
        if not messages:
            time.sleep(0.1)


def transports(grid: Grid) -> list[str]:
    """Return how the nodes are reached."""
    return sorted(getattr(grid, "transports", {0: "no stream"}).values())


def note(notes: Path, **line: Any) -> None:
    """Write a line."""
    with (notes / "notes.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
