"""How long the others wait for a worker that becomes four times slower in mid-run.

``python -m benchmarks.rebalance --data FOLDER``: real CIFAR-10 images, ResNet8, two equal cores.
After some epochs three busy processes start on the second core, so that its worker gets a quarter
of it. Once with ``rebalance = true``, once without.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import flower_blsgd

from .rows import Row, conditions, row, write

EPOCHS, SLOWER_AFTER, BUSY = 16, 6, 3
SETTINGS: dict[str, Any] = {
    "model": "resnet8",
    "validation_share": 0.9,
    "batch_size": 16,
    "learning_rate": 0.05,
    "local_steps_slow": "auto",
    "evaluate_every_epochs": 100,
}
WORKERS = "1x cpu:0 fast; 1x cpu:1 slow"
BUSY_LOOP = "import os; os.sched_setaffinity(0, {1})\nwhile True: pass"


def measure(data: str) -> tuple[list[Row], dict[str, Any]]:
    """Run both ways."""
    rows = []
    for rebalance in (True, False):
        shares, steps = run(data, rebalance)
        name = "with rebalance" if rebalance else "without"
        for what, first, last in (
            ("before", 1, SLOWER_AFTER),
            ("in the first epoch after", SLOWER_AFTER, SLOWER_AFTER + 1),
            ("in the second", SLOWER_AFTER + 1, SLOWER_AFTER + 2),
            ("from the third on", SLOWER_AFTER + 2, EPOCHS),
        ):
            part = [100 * share for share in shares[first:last]]
            rows.append(row(f"{name}: fast waits {what}", part, "%"))
        print(f"{name}: slow steps by epoch {steps}")
        print(f"{name}: fast waits by epoch (%) {[round(100 * share) for share in shares]}")
    return rows, conditions(
        workers=WORKERS,
        epochs=EPOCHS,
        busy_processes=BUSY,
        slower_after_epoch=SLOWER_AFTER,
        settings=SETTINGS,
        seed=0,
    )


def run(data: str, rebalance: bool) -> tuple[list[float], list[int]]:
    """Return by epoch: the share of the time that the fast worker waits, the slow one's steps."""
    busy: list[subprocess.Popen[bytes]] = []

    def slow_down(row: Any) -> None:
        if row.epoch == SLOWER_AFTER:
            busy.extend(subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(BUSY))
        if row.epoch == EPOCHS - 1:
            end(busy)

    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "run")
        try:
            flower_blsgd.train(
                "cifar10",
                data=data,
                workers=WORKERS,
                epochs=EPOCHS,
                rebalance=rebalance,
                out=out,
                on_epoch_end=slow_down,
                **SETTINGS,
            )
        finally:
            end(busy)
        lines = [json.loads(line) for line in (Path(out) / "rounds.jsonl").read_text().splitlines()]
    shares, steps = [], []
    for epoch in range(1, EPOCHS):  # the last is for its evaluation
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of the images")
    parser.add_argument("--json", type=Path, help="write the rows and their conditions here")
    options = parser.parse_args()
    write(*measure(options.data), options.json)
