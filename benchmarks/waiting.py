"""Who waits for a worker that is 16 times slower, and whether the plan knew.

``python -m benchmarks.waiting --data FOLDER``: real CIFAR-10 images, ResNet8, one fast core and
one slowed 16 times. Before each run the speeds are calibrated; the waiting share of the fast
worker and the seconds per epoch stand beside what ``blsgd plan`` says.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .rows import Row, conditions, row, write

WORKERS = "1x cpu:0 fast; 1x cpu:1 slow slowdown=16"
EPOCHS = {"biased-local-sgd": 4, "sync-sgd": 1, "balanced-local-sgd": 1}
RUNS = {"biased-local-sgd": 3, "sync-sgd": 1, "balanced-local-sgd": 1}
SETTINGS = {
    "task": "cifar10",
    "model": "resnet8",
    "validation-share": 0.5,
    "batch-size": 32,
    "local-steps-fast": 32,
    "local-steps-slow": "auto",
    "learning-rate": 0.05,
    "workers": WORKERS,
    "evaluate-every-epochs": 100,
}


def measure(data: str, algorithms: Sequence[str]) -> tuple[list[Row], dict[str, Any]]:
    """Run each algorithm, so many times."""
    rows = []
    for algorithm in algorithms:
        runs = [run(algorithm, data) for _ in range(RUNS[algorithm])]
        measured = [summary["measured"] for summary in runs]
        waiting = [100 * figures["fast_waiting_share"] for figures in measured]
        seconds = [figures["epoch_seconds"] for figures in measured]
        planned = [summary["predicted"]["epoch_seconds"] for summary in runs]
        rows += [
            row(f"{algorithm}: fast waits", waiting, "%"),
            row(f"{algorithm}: an epoch", seconds, "s"),
            row(
                f"{algorithm}: measured over planned",
                [own / plan for own, plan in zip(seconds, planned, strict=True)],
                "",
            ),
        ]
    shown = {key: value for key, value in SETTINGS.items() if key != "workers"}
    return rows, conditions(workers=WORKERS, epochs=EPOCHS, settings=shown, seed=0)


def run(algorithm: str, data: str) -> dict[str, Any]:
    """Calibrate, train, and return the run's summary."""
    with tempfile.TemporaryDirectory() as folder:
        profile, out = Path(folder) / "profile.json", Path(folder) / "run"
        settings = {**SETTINGS, "data": data, "profile": profile, "out": out}
        settings |= {"algorithm": algorithm, "epochs": EPOCHS[algorithm]}
        blsgd("calibrate", settings)
        blsgd("run", settings, ".")
        summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
        return summary


def blsgd(command: str, settings: dict[str, Any], *arguments: str) -> None:
    """Run a command with these settings."""
    words = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
    subprocess.run([sys.executable, "-m", "flower_blsgd", command, *arguments, *words], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of the images")
    parser.add_argument("--algorithms", nargs="+", choices=EPOCHS, default=list(EPOCHS))
    parser.add_argument("--json", type=Path, help="write the rows and their conditions here")
    options = parser.parse_args()
    write(*measure(options.data, options.algorithms), options.json)
