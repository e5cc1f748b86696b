"""Who waits for a worker that is 16 times slower, and whether the plan knew.

``python -m benchmarks.waiting --data FOLDER``: real CIFAR-10 images, ResNet8, one fast core and
one slowed 16 times. The speeds are calibrated once; then each algorithm trains, and the waiting
share of the fast worker and the seconds per epoch stand beside what ``blsgd plan`` says.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .rows import Row, conditions, row, write

WORKERS = "1x cpu:0 fast; 1x cpu:1 slow slowdown=16"
EPOCHS = {"biased-local-sgd": 4, "sync-sgd": 1, "balanced-local-sgd": 1}
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


def measure(data: str) -> tuple[list[Row], dict[str, Any]]:
    """Calibrate, then run each algorithm."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        settings = {**SETTINGS, "data": data, "profile": profile}
        blsgd("calibrate", settings)
        for algorithm, epochs in EPOCHS.items():
            out = Path(folder) / algorithm
            own = {"algorithm": algorithm, "epochs": epochs, "out": out}
            blsgd("run", {**settings, **own}, ".")
            summary = json.loads((out / "summary.json").read_text())
            measured, predicted = summary["measured"], summary["predicted"]
            rows += [
                row(f"{algorithm}: fast waits", [100 * measured["fast_waiting_share"]], "%"),
                row(
                    f"{algorithm}: an epoch",
                    [measured["epoch_seconds"]],
                    "s",
                    [predicted["epoch_seconds"]],
                    "plan",
                ),
            ]
    shown = {key: value for key, value in SETTINGS.items() if key != "workers"}
    return rows, conditions(workers=WORKERS, epochs=EPOCHS, settings=shown, seed=0)


def blsgd(command: str, settings: dict[str, Any], *arguments: str) -> None:
    """Run a command with these settings."""
    words = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
    subprocess.run([sys.executable, "-m", "flower_blsgd", command, *arguments, *words], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of the images")
    parser.add_argument("--json", type=Path, help="write the rows and their conditions here")
    options = parser.parse_args()
    write(*measure(options.data), options.json)
