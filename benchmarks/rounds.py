r"""What a round costs when nobody computes: our local grid, Flower's engines, and the floors.

The same ordinary Flower app on every engine: Flower's own FedAvg, and a client that returns the
model as it came. "Engine" is the time in which the messages are away, from the push to the last
reply; "round" is all of a round, with FedAvg's own averaging. BiasedLocalSGD runs on the local
grid with workers that claim to have done their steps.

Without options the two sizes that have a goal are measured. The local grid runs again before each
of the others, within one run, so that ratios hold on a noisy machine. The first rounds of each
run, in which processes start and memory is got, are left out. Ray runs with an actor for every
node, and with the resources that Flower gives it by itself (2 CPUs a node, so on 2 cores the nodes
take turns). The floors: one thread that copies one model for each worker once, and bare Python gRPC
with TLS that moves the same bytes there and back.

One cell alone:  python -m benchmarks.rounds --workers 10 --parameters 36e6 --engines local,memcpy
"""

import argparse
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from flower_blsgd.devices.machine import free_bytes

from .bare_grpc import round_seconds as grpc_seconds
from .cells import ENGINES, GOAL_CELLS, Cell, turns
from .noop_rounds import NotRunError, Parts, rounds_of
from .round_rows import rows_of
from .rows import Measured, Row, conditions, missing, parser, write

MOST_BUFFER_BYTES = 1 << 30
"""Of `copy_seconds`: far above any cache; more would only cost memory."""


def measure(cells: Sequence[Cell], engines: Sequence[str], repeats: int, quick: bool) -> Measured:
    """Measure cell after cell."""
    rows: list[Row] = []
    for cell in cells:
        measured, reasons = cell_seconds(cell, engines, repeats, quick)
        rows += rows_of(cell, engines, measured, reasons)
    return rows, conditions(
        repeats=repeats,
        ray="not installed" if missing("ray", "simulation") else version("ray"),
        grpcio=version("grpcio"),
        tensors={cell.parameters: cell.tensors for cell in cells},
    )


def cell_seconds(
    cell: Cell, engines: Sequence[str], repeats: int, quick: bool
) -> tuple[dict[str, Parts], dict[str, str]]:
    """Return the seconds of every engine that ran, and why the others did not."""
    measured: dict[str, Parts] = {}
    reasons = {}
    for name in engines:
        reason = ENGINES[name].why_not(cell, free_bytes(), quick)
        if name.startswith("ray"):
            reason = missing("ray", "simulation") or reason
        if reason:
            reasons[name] = reason
    for name in turns([name for name in engines if name not in reasons], repeats):
        if name in reasons:
            continue
        try:
            parts = one_run(name, cell, quick)
        except NotRunError as error:
            reasons[name] = str(error)
            measured.pop(name, None)
            continue
        for part, seconds in parts.items():
            measured.setdefault(name, {}).setdefault(part, []).extend(seconds)
    return measured, reasons


def one_run(name: str, cell: Cell, quick: bool) -> Parts:
    """Return the seconds of the rounds of one run."""
    engine = ENGINES[name]
    rounds = engine.rounds(cell, quick)
    if name == "memcpy":
        return {"copy": copy_seconds(cell.round_bytes, rounds)}
    if name == "grpc":
        seconds = grpc_seconds(cell.workers, cell.model_bytes, rounds + engine.warm_up_rounds)
        return {"engine": seconds[engine.warm_up_rounds :]}
    return rounds_of(name, cell, rounds, engine.warm_up_rounds)


def copy_seconds(num_bytes: int, repeats: int) -> list[float]:
    """Return the seconds in which one thread copies so many bytes once, after a warm-up.

    Source and target are as large as what is copied, up to 1 GiB; above it they are used again.
    """
    size = min(num_bytes, MOST_BUFFER_BYTES)
    source, target = (np.ones(size, np.uint8) for _ in range(2))
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for at in range(0, num_bytes, size):
            part = min(size, num_bytes - at)
            np.copyto(target[:part], source[:part])
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def numbers(text: str) -> list[int]:
    """Read whole numbers with commas between them: ``4,10`` or ``270e3,36e6``."""
    values = [float(part) for part in text.split(",")]
    if any(value < 2 or value != int(value) for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers of at least 2, such as 4,10")
    return [int(value) for value in values]


def engine_names(text: str) -> list[str]:
    """Read names of engines with commas between them."""
    names = [part.strip() for part in text.split(",")]
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: one of {', '.join(ENGINES)}")
    return names


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    line = parser(__doc__)
    line.add_argument("--workers", type=numbers, help="such as 4,10; with --parameters")
    line.add_argument("--parameters", type=numbers, help="such as 270e3,36e6; with --workers")
    line.add_argument("--engines", type=engine_names, help=f"of {','.join(ENGINES)}")
    line.add_argument("--repeats", type=int, default=1, help="turns of all engines in a cell")
    chosen = line.parse_args(arguments)
    if bool(chosen.workers) != bool(chosen.parameters):
        line.error("--workers and --parameters are given together")
    chosen.cells = [Cell(w, p) for w in chosen.workers or () for p in chosen.parameters]
    chosen.cells = chosen.cells or GOAL_CELLS[: 1 if chosen.quick else None]
    every = ["local", "ray", "memcpy"] if chosen.quick else list(ENGINES)
    chosen.engines = chosen.engines or every
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    chosen: Any = options(arguments)
    measured = measure(chosen.cells, chosen.engines, chosen.repeats, chosen.quick)
    write(*measured, chosen.json)


if __name__ == "__main__":
    main()
