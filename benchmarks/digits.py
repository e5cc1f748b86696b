"""Test accuracy on digits of every preset, over seeds, at equal samples.

All presets see the same number of samples; each seed has its own initial weights and draws.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from flower_blsgd.algorithm.catalog import ALGORITHMS

from .rows import Row, conditions, main, row

WORKERS = "1x cpu:0 fast; 1x cpu:1 slow slowdown=4"
SEEDS, EPOCHS = 3, 15
QUICKLY = ("biased-local-sgd", "sync-sgd")


def measure(quick: bool) -> tuple[list[Row], dict[str, object]]:
    """Run every preset with every seed, one after another."""
    seeds, epochs = (1, 2) if quick else (SEEDS, EPOCHS)
    accuracy: dict[str, list[float]] = {}
    waiting: dict[str, list[float]] = {}
    cases = {name: (name, WORKERS) for name in (QUICKLY if quick else ALGORITHMS)}
    cases["fast worker alone"] = ("balanced-local-sgd", "1x cpu:0 fast")
    for seed in range(seeds):
        for case, (algorithm, workers) in cases.items():
            summary = run(algorithm, workers, seed, epochs)
            accuracy.setdefault(case, []).append(100 * summary["accuracy"])
            waiting.setdefault(case, []).append(100 * (summary["fast_waiting_share"] or 0.0))
    rows = [row(f"{case}: accuracy", values, "%") for case, values in accuracy.items()]
    rows += [row(f"{case}: fast waits", values, "% of rounds") for case, values in waiting.items()]
    return rows, conditions(
        task="digits", workers=WORKERS, epochs=epochs, batch_size=16, local_steps="32 and 8",
        seeds=seeds, threads=1,
    )  # fmt: skip


def run(algorithm: str, workers: str, seed: int, epochs: int) -> dict[str, float]:
    """Return the summary of one run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = [f"algorithm={algorithm}", f"workers={workers}", f"seed={seed}", f"out={out}"]
        settings.append(f"epochs={epochs}")
        arguments = [part for setting in settings for part in ("-s", setting)]
        command = [sys.executable, "-m", "flower_blsgd", "run", ".", "-c", "digits", *arguments]
        subprocess.run([*command, "-s", "threads=1"], check=True, stdout=subprocess.DEVNULL)
        summary: dict[str, float] = json.loads((out / "summary.json").read_text())
        return summary


if __name__ == "__main__":
    main(measure, __doc__)
