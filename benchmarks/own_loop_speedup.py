"""How much sooner two unequal cores reach the accuracy of a hand-written loop on one.

``python -m benchmarks.own_loop_speedup``: a PyTorch loop trains resnet8 on CIFAR-10 for so many
``--seconds`` alone on core 0. The same script under ``blsgd launch``, and ``blsgd run``, train for
shares of this time on core 0 and on core 1, which is slowed by a factor of two. The rate falls in a
line to zero over each run's own time. The accuracies are of the last models, on the test images,
with recomputed statistics of BatchNorm.

With ``--rows``, finished runs are kept in a file, and only the others are done.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .images import add_data_option, required_images
from .rows import Measured, Row, conditions, parser, row, write
from .study.arms import ARMS, FAST_CORE, SHAPES, SLOW_CORE
from .study.estimator import Curve, Speedup, Target, interval, speedup
from .study.ours import result_of
from .study.runs import ALLOCATOR, ROOT, Run, Store, row_of
from .study.tasks import Places, finished, loaded, saved, settings_of

SCRIPT = ROOT / "benchmarks" / "own_loop_script.py"
ARM, SHAPE, RATE = ARMS["per-sample"], SHAPES["gap-2"], 0.05
"""The tuned settings of the second study, which also tuned the rate of the loop alone."""

SHARES = (0.65, 0.8, 1.0)
ALONE, LAUNCHED, RUN = "script alone", "blsgd launch", "blsgd run"
WORKERS = f"1x cpu:{FAST_CORE} fast; 1x cpu:{SLOW_CORE} slow slowdown={SHAPE.gap:g}"


def done(command: Sequence[str], folder: Path) -> None:
    """Run a command in a folder; RuntimeError with its last line if it fails."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **ALLOCATOR}
    finished = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError((finished.stderr.strip().splitlines() or ["no output"])[-1])


def trained_alone(settings: dict[str, Any], folder: Path) -> Row:
    """Let the script train alone on the fast core."""
    done(
        ["taskset", "-c", str(FAST_CORE), sys.executable, str(SCRIPT), json.dumps(settings)], folder
    )
    torch.set_num_threads(1)
    task = loaded(settings["task"], settings["seed"])
    return finished(task, saved(task, Path(settings["model"])))


def trained_launched(settings: dict[str, Any], folder: Path) -> Row:
    """Let the script train on both cores."""
    fast, slow = SHAPE.steps
    run = {
        "algorithm": "weighted-local-sgd",
        "batch-size": ARM.batch,
        "local-steps-fast": fast,
        "local-steps-slow": slow,
        "seed": settings["seed"],
        "threads": 1,
        "checkpoint-minutes": 1e6,
        "out": "run",
        **ARM.settings,
    }
    words = [word for key, value in run.items() for word in ("-s", f"{key}={value}")]
    launch = [sys.executable, "-m", "flower_blsgd", "launch", "--workers", WORKERS, *words]
    length = ["--seconds", str(settings["seconds"])]
    done([*launch, *length, str(SCRIPT), json.dumps(settings)], folder)
    return result_of(folder / "run", settings["task"], settings["seed"])


def result(arm: str, seed: int, seconds: float, places: Places) -> Row:
    """Do a run, and return its row; RuntimeError if it fails."""
    if arm == RUN:
        run = Run("own-loop", "per-sample", RATE, seconds, seed=seed, task="cifar10", clock="wall")
        found = row_of(run, places)
        if "error" in found:
            raise RuntimeError(found["error"])
    else:
        with tempfile.TemporaryDirectory() as name:
            settings = {
                "task": settings_of("cifar10", places),
                "seed": seed,
                "rate": RATE,
                "batch": ARM.batch,
                "seconds": seconds,
                "model": str(Path(name, "alone.safetensors")),
            }
            train = trained_alone if arm == ALONE else trained_launched
            found = train(settings, Path(name))
    return {**found, "arm": arm, "seed": seed, "seconds": seconds}


def runs(seconds: float, seeds: int) -> Iterator[tuple[str, int, float]]:
    """Yield arm, seed and seconds of all runs, seed after seed."""
    for seed in range(seeds):
        yield ALONE, seed, seconds
        for share in SHARES:
            for arm in (LAUNCHED, RUN):
                yield arm, seed, share * seconds


def speedups(rows: Sequence[Row], seconds: float, seeds: int) -> dict[str, Speedup]:
    """Return how many times sooner each way reaches the accuracy of the script alone."""
    reached = {(r["arm"], r["seed"], r["seconds"]): r["accuracy"] for r in rows}
    targets = [Target(seconds, reached[ALONE, seed, seconds]) for seed in range(seeds)]
    budgets = tuple(share * seconds for share in SHARES)
    return {
        arm: speedup(
            [Curve(budgets, tuple(reached[arm, s, b] for b in budgets)) for s in range(seeds)],
            targets,
        )
        for arm in (LAUNCHED, RUN)
    }


def table(rows: Sequence[Row], seconds: float, seeds: int) -> list[Row]:
    """Return the rows of the table, with means and intervals of 95 % over seeds."""
    found = speedups(rows, seconds, seeds)
    accuracies = [r["accuracy"] for r in rows if (r["arm"], r["seconds"]) == (ALONE, seconds)]
    made = [row(f"{ALONE}, {seconds:g} s", accuracies, "accuracy")]
    for arm, its in found.items():
        beyond = {"shortest_was_enough": its.at_shortest, "longest_was_not": its.beyond_longest}
        made.append(_factors(f"{arm}, times sooner", its.by_seed) | beyond)
    pairs = zip(found[LAUNCHED].by_seed, found[RUN].by_seed, strict=True)
    last = _factors(f"{LAUNCHED} over {RUN}", [launched / run for launched, run in pairs])
    met = last["low"] <= 1 <= last["high"] if seeds > 1 else None
    return [*made, {**last, "goal": "1 in the interval", "goal_met": met}]


def _factors(name: str, by_seed: Sequence[float]) -> Row:
    """Return a row with the geometric mean, and its interval if there are several seeds."""
    of_logs = interval([math.log(factor) for factor in by_seed]).times
    low, high = (of_logs.low, of_logs.high) if of_logs.count > 1 else (None, None)
    return {**row(name, by_seed, "x"), "geometric_mean": of_logs.mean, "low": low, "high": high}


def measure(chosen: argparse.Namespace) -> Measured:
    """Do the runs that are missing."""
    places = Places(required_images(chosen.data), tiny=chosen.quick)
    with tempfile.TemporaryDirectory() as name:
        file = chosen.rows or Path(name, "rows.jsonl")
        store = Store(file.parent)
        kept = {(r["arm"], r["seed"], r["seconds"]) for r in store.read(file.stem)}
        for one in runs(chosen.seconds, chosen.seeds):
            if one not in kept:
                store.append(file.stem, result(*one, places))
                print(*one, store.read(file.stem)[-1]["accuracy"], flush=True)
        rows = store.read(file.stem)
    made = table(rows, chosen.seconds, chosen.seeds)
    taken_under = conditions(
        workers=WORKERS,
        model="resnet8",
        images="512 of CIFAR-10" if chosen.quick else "CIFAR-10",
        batch=ARM.batch,
        rate=RATE,
        local_steps=SHAPE.steps,
        seconds=chosen.seconds,
        shares=SHARES,
        seeds=chosen.seeds,
    )
    return made, taken_under


def options() -> argparse.Namespace:
    """Read the command line."""
    line = parser(__doc__)
    add_data_option(line)
    line.add_argument("--seconds", type=float, help="of the script alone (default: 60; quick: 2)")
    line.add_argument("--seeds", type=int, help="number of seeds (default: 3; quick: 1)")
    line.add_argument("--rows", type=Path, help="FILE.jsonl that finished runs are kept in")
    chosen = line.parse_args()
    chosen.seconds = chosen.seconds or (2.0 if chosen.quick else 60.0)
    chosen.seeds = chosen.seeds or (1 if chosen.quick else 3)
    if chosen.rows is not None and chosen.rows.suffix != ".jsonl":
        line.error(f"--rows {chosen.rows}: the name must end in .jsonl")
    return chosen


def print_means(rows: Sequence[Row]) -> None:
    """Print the geometric means with their intervals."""
    for one in rows:
        if one.get("low") is not None:
            mean, low, high = (one[key] for key in ("geometric_mean", "low", "high"))
            print(f"{one['name']}: {mean:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    given = options()
    measured, under = measure(given)
    write(measured, under, given.json)
    print_means(measured)
