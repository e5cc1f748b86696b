"""How long the others wait for a worker that becomes four times slower in mid-run.

``python -m benchmarks.rebalance``: real CIFAR-10 images, ResNet8, two equal cores.
After some epochs three busy processes start on the second core, so that its worker gets a quarter
of it. Once with ``rebalance = true``, once without.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import flower_blsgd

from .images import add_data_option, data_text, found_images, required_images
from .rows import Row, conditions, parser, row, write

EPOCHS, SLOWER_AFTER, BUSY = 16, 6, 3
QUICK_EPOCHS, QUICK_SLOWER_AFTER, QUICK_IMAGES = 8, 3, 1024
SETTINGS: dict[str, Any] = {
    "model": "resnet8",
    "batch_size": 16,
    "learning_rate": 0.05,
    "local_steps_slow": "auto",
    "evaluate_every_epochs": 100,
}
WORKERS = "1x cpu:0 fast; 1x cpu:1 slow"
BUSY_LOOP = "import os; os.sched_setaffinity(0, {1})\nwhile True: pass"


WHOLE = {"task": "cifar10", "validation_share": 0.9}


def measure(
    task: dict[str, Any], epochs: int = EPOCHS, slower_after: int = SLOWER_AFTER
) -> tuple[list[Row], dict[str, Any]]:
    """Run both ways on a task: what names it among the arguments of `train`."""
    rows = []
    for rebalance in (True, False):
        shares, steps = run(task, rebalance, epochs, slower_after)
        name = "with rebalance" if rebalance else "without"
        for what, first, last in (
            ("before", 1, slower_after),
            ("in the first epoch after", slower_after, slower_after + 1),
            ("in the second", slower_after + 1, slower_after + 2),
            ("from the third on", slower_after + 2, epochs),
        ):
            part = [100 * share for share in shares[first:last]]
            rows.append(row(f"{name}: fast waits {what}", part, "%"))
        print(f"{name}: slow steps by epoch {steps}")
        print(f"{name}: fast waits by epoch (%) {[round(100 * share) for share in shares]}")
    return rows, conditions(
        workers=WORKERS,
        epochs=epochs,
        busy_processes=BUSY,
        slower_after_epoch=slower_after,
        settings={**SETTINGS, **{key: task[key] for key in task if key != "data"}},
        seed=0,
    )


def run(
    task: dict[str, Any], rebalance: bool, epochs: int, slower_after: int
) -> tuple[list[float], list[int]]:
    """Return by epoch: the share of the time that the fast worker waits, the slow one's steps."""
    busy: list[subprocess.Popen[bytes]] = []

    def slow_down(row: Any) -> None:
        if row.epoch == slower_after:
            busy.extend(subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(BUSY))
        if row.epoch == epochs - 1:
            end(busy)

    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "run")
        try:
            flower_blsgd.train(
                **task,
                workers=WORKERS,
                epochs=epochs,
                rebalance=rebalance,
                out=out,
                on_epoch_end=slow_down,
                **SETTINGS,
            )
        finally:
            end(busy)
        lines = [json.loads(line) for line in (Path(out) / "rounds.jsonl").read_text().splitlines()]
    shares, steps = [], []
    for epoch in range(1, epochs):  # the last is for its evaluation
        rounds = [line for line in lines if line["epoch"] == epoch]
        waited = sum(line["workers"][0]["waiting_seconds"] for line in rounds)
        shares.append(waited / sum(line["round_seconds"] for line in rounds))
        steps.append(statistics.mode(line["workers"][1]["local_steps"] for line in rounds))
    return shares, steps


def end(busy: list[subprocess.Popen[bytes]]) -> None:
    """End the busy processes."""
    for process in busy:
        process.kill()
        process.wait()
    busy.clear()


if __name__ == "__main__":
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("two cores are needed")
    line = parser(__doc__)
    add_data_option(line)
    given = line.parse_args()
    if given.quick:
        some = data_text(QUICK_IMAGES, found_images(given.data))
        named = {"task": "benchmarks.images:some_images", "data": some}
        measured = measure(named, QUICK_EPOCHS, QUICK_SLOWER_AFTER)
    else:
        measured = measure({**WHOLE, "data": required_images(given.data)})
    write(*measured, given.json)
