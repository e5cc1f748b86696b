r"""What a round costs when nobody computes: our local grid, Flower's engines, and the floors.

The same ordinary Flower app on every engine: Flower's own FedAvg, and a client that returns the
model as it came. "Engine" is the time in which the messages are away, from the push to the last
reply; "round" is all of a round, with FedAvg's own averaging. BiasedLocalSGD runs on the local
grid with workers that claim to have done their steps.

The local grid runs again before each of the others, within one run, so that ratios hold on a noisy
machine. The first rounds of each run, in which processes start and memory is got, are left out.
Ray with an actor for every node, and Ray with the resources that Flower gives it by itself (2 CPUs
a node, so on 2 cores the nodes take turns). The floors: one thread that copies one model for each
worker once, and bare Python gRPC with TLS that moves the same bytes there and back.

One cell alone:  python -m benchmarks.rounds --workers 10 --parameters 36e6 --engines local,memcpy
"""

import argparse
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from flower_blsgd.runtime.devices import free_bytes

from .bare_grpc import round_seconds as grpc_seconds
from .cells import ENGINES, Cell, cells_of, turns
from .copying import copy_seconds
from .noop_rounds import NotRunError, Parts, rounds_of
from .round_rows import rows_of
from .rows import Measured, Row, conditions, missing, parser, write

WORKERS = (2, 4, 10, 32)
PARAMETERS = (270_000, 11_000_000, 36_000_000, 86_000_000)


def measure(
    cells: Sequence[Cell], engines: Sequence[str], repeats: int, minutes: float, quick: bool
) -> Measured:
    """Measure cell after cell until the time is up."""
    ends_at = time.monotonic() + 60 * minutes
    rows: list[Row] = []
    for cell in cells:
        late = f"the {minutes:g} minutes were over" if time.monotonic() > ends_at else None
        measured, reasons = cell_seconds(cell, engines, repeats, quick, late)
        rows += rows_of(cell, engines, measured, reasons)
    return rows, conditions(
        repeats=repeats,
        minutes=minutes,
        ray="not installed" if missing("ray", "simulation") else version("ray"),
        grpcio=version("grpcio"),
        tensors={cell.parameters: cell.tensors for cell in cells},
    )


def cell_seconds(
    cell: Cell, engines: Sequence[str], repeats: int, quick: bool, late: str | None = None
) -> tuple[dict[str, Parts], dict[str, str]]:
    """Return the seconds of every engine that ran, and why the others did not."""
    measured: dict[str, Parts] = {}
    reasons = {}
    for name in engines:
        reason = late or ENGINES[name].why_not(cell, free_bytes(), quick)
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
    """Read the command line; what is left out depends on --quick."""
    line = parser(__doc__)
    line.add_argument("--workers", type=numbers, help="such as 4,10")
    line.add_argument("--parameters", type=numbers, help="such as 270e3,36e6")
    line.add_argument("--engines", type=engine_names, help=f"of {','.join(ENGINES)}")
    line.add_argument("--repeats", type=int, help="turns of all engines in a cell (default: 1)")
    line.add_argument(
        "--minutes", type=float, default=20.0, help="no cell begins after them (default: 20)"
    )
    chosen = line.parse_args(arguments)
    quick = chosen.quick
    chosen.workers = chosen.workers or ([4] if quick else list(WORKERS))
    chosen.parameters = chosen.parameters or ([270_000] if quick else list(PARAMETERS))
    chosen.engines = chosen.engines or (["local", "ray", "memcpy"] if quick else list(ENGINES))
    chosen.repeats = chosen.repeats or 1
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    chosen: Any = options(arguments)
    cells = cells_of(chosen.workers, chosen.parameters)
    measured = measure(cells, chosen.engines, chosen.repeats, chosen.minutes, chosen.quick)
    write(*measured, chosen.json)


if __name__ == "__main__":
    main()
