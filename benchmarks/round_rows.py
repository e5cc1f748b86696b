"""The rows of a cell of the table of rounds, with what each is compared to."""

from collections.abc import Mapping, Sequence

from .cells import ENGINES, GOAL_CELLS, Cell
from .rows import Row, not_run, row, with_goal

UNIT = "s per round"
_OURS = ("local", "biased")


def rows_of(
    cell: Cell,
    engines: Sequence[str],
    measured: Mapping[str, Mapping[str, Sequence[float]]],
    reasons: Mapping[str, str],
) -> list[Row]:
    """Return the rows of a cell: ours as multiples of a copy, the others as multiples of ours.

    Parameters
    ----------
    cell : Cell
        How many workers and parameters.
    engines : sequence of str
        Keys of `ENGINES`, in the order of the rows.
    measured : mapping
        Engine -> part of a round -> its seconds, of each engine that ran.
    reasons : mapping of str to str
        Engine -> why it did not run, of all others.
    """
    rows = []
    for name in engines:
        for part in _parts(name):
            title = f"{cell}: {part}, {ENGINES[name].name}"
            if name in reasons:
                made = not_run(title, reasons[name], UNIT)
            else:
                base = _base_of(name, measured)
                against = measured.get(base, {}).get("copy" if base == "memcpy" else part)
                seconds = measured[name][part]
                made = row(title, seconds, UNIT, against, ENGINES[base].name if against else "")
            rows.append(_with_its_goal(cell, name, part, made))
    return rows


def _base_of(name: str, measured: Mapping[str, object]) -> str:
    """Return what an engine is a multiple of; of the stream without a local grid, bare gRPC."""
    if name == "stream" and "local" not in measured:
        return "grpc"
    return "memcpy" if name in _OURS else "local"


def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of a round that an engine tells."""
    return {"memcpy": ("copy",), "grpc": ("engine",), "biased": ("round",)}.get(
        name, ("engine", "round")
    )


def _with_its_goal(cell: Cell, name: str, part: str, made: Row) -> Row:
    small, large = GOAL_CELLS
    if part != "engine":
        return made
    if (cell, name, made["against"]) == (Cell(2, 270_000), "stream", ENGINES["grpc"].name):
        return with_goal(made, at_most=1.3, of="ratio")
    if (cell, name) == (small, "local"):
        return with_goal(made, at_most=0.003)
    if (cell, name) == (small, "ray"):
        return with_goal(made, at_least=60, of="ratio")
    if (cell, name) == (large, "local"):
        return with_goal(made, at_most=4, of="ratio")
    return made
