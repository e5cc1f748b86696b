"""What a round costs when nobody computes: our local grid against Flower's Ray simulation.

The same ordinary Flower app, with Flower's own FedAvg, on both engines: 4 nodes, 270,000
parameters in 20 tensors; the client returns the model as it came. "Engine" is the time in which
the messages are away (push to last reply); the rest of a round is FedAvg's own averaging. The
engines take turns within one run: ours; Ray with an actor for every node; Ray with the resources
that Flower gives it by itself (2 CPUs a node, so on 2 cores the nodes take turns). The first
rounds of each turn, in which processes start, are left out. One row more: BiasedLocalSGD on the
local grid, all of a round but the steps.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .rows import Row, conditions, main, row

FOLDER = Path(__file__).parent
NODES, PARAMETERS, TENSORS = 4, 270_000, 20
WARM_UP_ROUNDS = 5
LOCAL = ["-m", "flower_blsgd", "run"]
SIMULATION = ["scripts/flower_engine.py", "simulation"]


def measure(quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Run the engines in turn."""
    turns = 1 if quick else 3
    seconds: dict[str, list[float]] = {}
    for _ in range(turns):
        for engine, command, app, rounds in (
            ("local grid", LOCAL, "noop_app", 200),
            ("Ray simulation", SIMULATION, "noop_app", 20),
            ("Ray as it comes", [*SIMULATION, "--stock"], "noop_app", 20),
            ("BiasedLocalSGD", LOCAL, "noop_biased_app", 200),
        ):
            for part, values in rounds_of(command, FOLDER / app, rounds).items():
                seconds.setdefault(f"{engine}, {part}", []).extend(values)
    ours, theirs = seconds["local grid, engine"], seconds["Ray simulation, engine"]
    rows = [
        row("engine, local grid", ours, "s per round"),
        row("engine, Ray simulation", theirs, "s per round", ours, "local grid"),
        row(
            "engine, Ray simulation as it comes",
            seconds["Ray as it comes, engine"],
            "s per round",
            ours,
            "local grid",
        ),
        row("FedAvg round, local grid", seconds["local grid, round"], "s per round"),
        row(
            "FedAvg round, Ray simulation",
            seconds["Ray simulation, round"],
            "s per round",
            seconds["local grid, round"],
            "local grid",
        ),
        row("BiasedLocalSGD round, local grid", seconds["BiasedLocalSGD, round"], "s per round"),
        row("copying the model 2 x 4 times", memcpy(), "s per round", ours, "engine, local grid"),
    ]
    return rows, conditions(nodes=NODES, parameters=PARAMETERS, tensors=TENSORS, turns=turns)


def rounds_of(command: Sequence[str], app: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round but the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rounds.json"
        settings = f"rounds={rounds} parameters={PARAMETERS} tensors={TENSORS} out='{out}'"
        simulated = "simulation" in command
        where = ["--app", str(app), "--num-supernodes", str(NODES)] if simulated else [str(app)]
        workers = [] if simulated else ["--workers", "3x cpu fast; 1x cpu slow"]
        subprocess.run(
            [sys.executable, *command, *where, *workers, "-c", settings],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        parts: dict[str, list[float]] = json.loads(out.read_text())
        return {part: values[WARM_UP_ROUNDS:] for part, values in parts.items()}


def memcpy() -> list[float]:
    """Return the seconds that one process needs to copy the model there and back."""
    source, target = (np.ones(PARAMETERS, np.float32) for _ in range(2))
    seconds = []
    for _ in range(100):
        began = time.perf_counter()
        for _ in range(2 * NODES):
            np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main(measure, __doc__)
