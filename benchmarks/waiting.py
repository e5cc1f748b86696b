"""Who waits for a worker that is 16 times slower, and whether the plan knew.

``python -m benchmarks.waiting``: real CIFAR-10 images, ResNet8, one fast core and
one slowed 16 times. Before each run the speeds are calibrated; the waiting share of the fast
worker and the seconds per epoch stand beside what ``blsgd plan`` says.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .images import add_data_option, data_text, found_images, required_images
from .rows import Row, conditions, parser, row, write

WORKERS = "1x cpu:0 fast; 1x cpu:1 slow slowdown=16"
EPOCHS = {"biased-local-sgd": 4, "sync-sgd": 1, "balanced-local-sgd": 1}
RUNS = {"biased-local-sgd": 3, "sync-sgd": 1, "balanced-local-sgd": 1}
SETTINGS = {
    "model": "resnet8",
    "batch-size": 32,
    "local-steps-fast": 32,
    "local-steps-slow": "auto",
    "learning-rate": 0.05,
    "workers": WORKERS,
    "evaluate-every-epochs": 100,
}
WHOLE = {"task": "cifar10", "validation-share": 0.5}
QUICK_IMAGES = 2048


def measure(
    task: dict[str, Any], algorithms: Sequence[str], quick: bool
) -> tuple[list[Row], dict[str, Any]]:
    """Run each algorithm, so many times, on a task: what names it in a run config."""
    rows = []
    for algorithm in algorithms:
        runs = [run(algorithm, task) for _ in range(1 if quick else RUNS[algorithm])]
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
    shown = {**SETTINGS, **task}
    del shown["workers"], shown["data"]
    return rows, conditions(workers=WORKERS, epochs=EPOCHS, settings=shown, seed=0)


def run(algorithm: str, task: dict[str, Any]) -> dict[str, Any]:
    """Calibrate, train, and return the run's summary."""
    with tempfile.TemporaryDirectory() as folder:
        profile, out = Path(folder) / "profile.json", Path(folder) / "run"
        settings = {**SETTINGS, **task, "profile": profile, "out": out}
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
    line = parser(__doc__)
    add_data_option(line)
    line.add_argument("--algorithms", nargs="+", choices=EPOCHS, help="quick: biased only")
    given = line.parse_args()
    chosen = given.algorithms or (["biased-local-sgd"] if given.quick else list(EPOCHS))
    if given.quick:
        some = data_text(QUICK_IMAGES, found_images(given.data))
        named: dict[str, Any] = {"task": "benchmarks.images:some_images", "data": some}
    else:
        named = {**WHOLE, "data": required_images(given.data)}
    write(*measure(named, chosen, given.quick), given.json)
