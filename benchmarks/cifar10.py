"""CIFAR-10 with 8 fast and 2 slow workers on this CPU, against one hand-written loop.

``python -m benchmarks.cifar10``: the run is ``configs/cifar10-2c8g.toml`` with CPU
workers that share the cores; the loop is plain SGD on all cores, over the same number of steps of
the same batch size. The run's time is its ``training_seconds`` (evaluation and set-up stand
apart, as they do for the loop). One run each: the spread is not known. With ``--quick`` a part of
the images, fewer workers and short rounds, whose accuracy means nothing.
"""

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
from flower_blsgd.worker.evaluation import evaluate_sums

from .images import add_data_option, data_text, found_images, required_images
from .rows import Row, conditions, parser, row, write

BATCH_SIZE, MOMENTUM, WEIGHT_DECAY, LEARNING_RATE = 32, 0.9, 1e-4, 0.1
WORKERS = "8x cpu fast; 2x cpu slow steps=1"
QUICK_IMAGES, QUICK_WORKERS = 2048, "2x cpu fast; 1x cpu slow steps=1"


def measure(task: dict[str, Any], epochs: int) -> tuple[list[Row], dict[str, Any]]:
    """Run both on a task: what names it in a run config."""
    ours = run(task, epochs)
    steps = ours["samples"] // BATCH_SIZE
    seconds, accuracy = bare_loop(load_task(task["task"], task["data"], "resnet20"), steps)
    rows = [
        row("bare loop", [seconds], "s"),
        row("blsgd run", [ours["training_seconds"]], "s", [seconds], "bare loop"),
        row("bare loop, accuracy", [accuracy], "of 1"),
        row("blsgd run, accuracy", [ours["accuracy"]], "of 1"),
    ]
    return rows, conditions(
        config="cifar10-2c8g",
        workers=task.get("workers", WORKERS),
        epochs=epochs,
        steps=steps,
        rounds=ours["rounds"],
        threads_of_the_loop=torch.get_num_threads(),
        task=task["task"],
        seed=0,
    )


def run(task: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Return the summary of a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = {
            "epochs": epochs,
            "workers": WORKERS,
            "out": out,
            **task,
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
    return seconds, evaluate_sums(model, task.test, task.loss, task.metric).metric


if __name__ == "__main__":
    line = parser(__doc__)
    add_data_option(line)
    line.add_argument("--epochs", type=int, default=2, choices=(1, 2, 3))
    given = line.parse_args()
    if given.quick:
        some = data_text(QUICK_IMAGES, found_images(given.data))
        chosen = {"task": "benchmarks.images:some_images", "data": some, "local-steps-fast": 16}
        chosen["workers"] = QUICK_WORKERS
    else:
        chosen = {"task": "cifar10", "data": required_images(given.data)}
    write(*measure(chosen, given.epochs), given.json)
