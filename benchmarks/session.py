"""What a session costs a training script.

``python -m benchmarks.session``: one worker trains in blocks of 200 steps, with and without
`Session.step` in turns (resnet8, batches of 16, one thread; rounds as the launcher chooses them).
A round in which nobody computes, with four workers and 270,000 parameters, against the local grid
with a ClientApp that computes nothing. The bytes of a round with a low-rank adapter on frozen
parameters, and the memory of the launcher with them. The share of a round with averaged gradients
(an adapter of 1 MB, steps of 100 ms, a worker of half the speed) in which the fast worker computes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from flower_blsgd.devices.machine import usable_cores

from .cells import Cell
from .noop_rounds import rounds_of
from .rows import Measured, conditions, main, row, with_goal
from .step import paired

ROOT = Path(__file__).parent
PARAMETERS, WORKERS = 270_000, 4
FROZEN, RANK = 50_000_000, 8
WARM_UP = 50

_MEMORY = (
    "import sys; from flower_blsgd.cli.main import main; code = main(); "
    "print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM'))); "
    "sys.exit(code)"
)
"""``blsgd`` that prints the most memory it had, in kB, in the end."""


def launched(folder: Path, workers: str, rounds: int, *script: object) -> tuple[list[Any], int]:
    """Return the records of the rounds of a launched script, and the launcher's memory in bytes."""
    options = ["--workers", workers, "--rounds", str(rounds), "-s", "threads=1", "-s", "name=run"]
    options += [] if script[0] != "gradients" else ["-s", "average=gradients"]
    file = str(ROOT / "session_script.py")
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, "launch", *options, file, *map(str, script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    lines = Path(folder, "runs/latest/rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], 1024 * int(done.stdout.splitlines()[-1])


def idle_round_seconds(rounds: int) -> list[float]:
    """Return the seconds of rounds in which four scripts compute nothing."""
    workers = f"{WORKERS - 1}x cpu fast steps=1 batch=2; 1x cpu slow steps=1 batch=2"
    with tempfile.TemporaryDirectory() as folder:
        records, _ = launched(Path(folder), workers, rounds + WARM_UP, "idle", PARAMETERS)
    return [one["planning_seconds"] + one["round_seconds"] for one in records[WARM_UP:]]


def computing_shares(rounds: int) -> list[float]:
    """Return the share of each round with averaged gradients in which the fast worker computes."""
    workers = "1x cpu fast batch=16; 1x cpu slow batch=8"
    with tempfile.TemporaryDirectory() as folder:
        records, _ = launched(Path(folder), workers, rounds + WARM_UP, "gradients", 0.1)
    return [
        one["workers"][0]["compute_seconds"] / (one["planning_seconds"] + one["round_seconds"])
        for one in records[WARM_UP:]
    ]


def measure(quick: bool) -> Measured:
    """Measure the cost of steps, of a round, and of frozen parameters."""
    blocks, rounds, turns = (2, 20, 1) if quick else (10, 500, 3)
    core = min(usable_cores())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "blocks.json")
        launched(Path(folder), f"1x cpu:{core} fast", 4000, "steps", file, blocks)
        pairs = json.loads(file.read_text())
    ours, bare = ([3200 / seconds for seconds in each] for each in zip(*pairs, strict=True))
    idle, grid = [], []
    for _ in range(turns):
        idle += idle_round_seconds(rounds)
        grid += rounds_of("biased", Cell(WORKERS, PARAMETERS), rounds, WARM_UP)["round"]
    with tempfile.TemporaryDirectory() as folder:
        workers = "2x cpu steps=1 batch=2 seconds-per-step=1"
        adapter, memory = launched(Path(folder), workers, 5, "adapter", FROZEN, RANK)
        _, without = launched(Path(folder), workers, 5, "adapter", 10_000, RANK)
    shares = computing_shares(rounds)
    side = int(FROZEN**0.5)
    moved = [float(one["bytes_moved"]) for one in adapter]
    floor = 2 * 2 * 2 * side * RANK * 4  # two workers, there and back, two matrices of float32
    rows = [
        row("the script's steps without the session", bare, "samples/s"),
        with_goal(
            paired("with the session", "samples/s", ours, bare, "without"),
            at_least=0.98,
            of="ratio",
        ),
        row("round of the local grid, nobody computes", grid, "s"),
        with_goal(
            row("round of a session", idle, "s", grid, "local grid"), at_most=1.5, of="ratio"
        ),
        with_goal(
            row("bytes of a round with an adapter", moved, "bytes", [float(floor)], "adapter"),
            at_most=1.05,
            of="ratio",
        ),
        with_goal(row("averaged gradients: computing", shares, "of a round"), at_least=0.96),
        row("launcher's memory with frozen parameters", [memory / 1e6], "MB"),
        row("launcher's memory without", [without / 1e6], "MB"),
    ]
    return rows, conditions(
        workers=WORKERS, parameters=PARAMETERS, frozen_parameters=FROZEN, rank=RANK, blocks=blocks
    )


if __name__ == "__main__":
    main(measure, __doc__)
