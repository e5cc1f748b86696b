"""CIFAR-10 with 8 fast and 2 slow workers on this CPU, against one hand-written loop.

``python -m benchmarks.cifar10 --data FOLDER``: the run is ``configs/cifar10-2c8g.toml`` with CPU
workers that share the cores; the loop is plain SGD on all cores, over the same number of steps of
the same batch size. The run's time is its ``training_seconds`` (evaluation and set-up stand
apart, as they do for the loop). One run each: the spread is not known.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flower_blsgd.tasks import Task, load_task
from flower_blsgd.worker.evaluation import evaluate

from .rows import Row, conditions, row, write

BATCH_SIZE, MOMENTUM, WEIGHT_DECAY, LEARNING_RATE = 32, 0.9, 1e-4, 0.1
WORKERS = "8x cpu fast; 2x cpu slow steps=1"


def measure(data: str, epochs: int, processes: int) -> tuple[list[Row], dict[str, Any]]:
    """Run both."""
    ours = run(data, epochs, processes)
    steps = ours["samples"] // BATCH_SIZE
    seconds, accuracy = bare_loop(load_task("cifar10", data), steps)
    rows = [
        row("bare loop", [seconds], "s"),
        row("blsgd run", [ours["training_seconds"]], "s", [seconds], "bare loop"),
        row("bare loop, accuracy", [accuracy], "of 1"),
        row("blsgd run, accuracy", [ours["accuracy"]], "of 1"),
    ]
    return rows, conditions(
        config="cifar10-2c8g",
        workers=WORKERS,
        epochs=epochs,
        steps=steps,
        rounds=ours["rounds"],
        threads_of_the_loop=torch.get_num_threads(),
        processes_per_device=processes,
        seed=0,
    )


def run(data: str, epochs: int, processes: int) -> dict[str, Any]:
    """Return the summary of a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = {
            "data": data,
            "epochs": epochs,
            "workers": WORKERS,
            "processes-per-device": processes,
            "out": out,
        }
        words = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
        command = [sys.executable, "-m", "flower_blsgd", "run", ".", "-c", "cifar10-2c8g"]
        subprocess.run([*command, *words], check=True)
        summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
        return summary


def bare_loop(task: Task, steps: int) -> tuple[float, float]:
    """Return seconds and accuracy of what anybody would write by hand."""
    model = task.initial_model(0).train()
    images, labels = (torch.from_numpy(part) for part in task.train)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    loss = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(0)
    order = torch.cat([torch.randperm(len(labels), generator=generator) for _ in range(3)])
    assert task.augment is not None
    began = time.perf_counter()
    for batch in order[: steps * BATCH_SIZE].split(BATCH_SIZE):
        inputs = task.augment(images[batch], generator)
        optimizer.zero_grad()
        loss(model(inputs), labels[batch]).backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    return seconds, evaluate(model, task.test, task.loss, task.metric)[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of the images")
    parser.add_argument("--epochs", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--processes-per-device", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows and their conditions here")
    options = parser.parse_args()
    write(*measure(options.data, options.epochs, options.processes_per_device), options.json)
