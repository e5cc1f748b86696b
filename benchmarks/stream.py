"""What a round costs on a SuperLink with SuperNodes when nobody computes: stream, messages, gRPC.

An ordinary Flower app with Flower's own FedAvg, and the two lines that put it on the stream; the
client returns the model as it came. "Engine" is the time in which the messages are away. The
floor is bare Python gRPC with TLS that moves the same bytes between as many processes.
"""

from typing import Any

from .bare_grpc import round_seconds
from .cells import Cell
from .noop_rounds import NotRunError, Parts, rounds_of
from .rows import Row, conditions, main, not_run, row

SMALL = Cell(2, 270_000)
LARGE = Cell(10, 11_500_000)
WARM_UP_ROUNDS = 3
UNIT = "s per round"


def measure(quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Run all of them, one after another."""
    rows = of_size(SMALL, quick, rounds=500, floor_rounds=200)
    if quick:
        rows += [not_run(f"{LARGE}: all", "left out by --quick", UNIT)]
    else:
        rows += of_size(LARGE, quick, rounds=15, floor_rounds=15)
    return rows, conditions(
        tensors={cell.parameters: cell.tensors for cell in (SMALL, LARGE)},
        warm_up_rounds=WARM_UP_ROUNDS,
    )


def of_size(cell: Cell, quick: bool, rounds: int, floor_rounds: int) -> list[Row]:
    """Return the rows of a size; messages only where they end within minutes."""
    every = round_seconds(cell.workers, cell.model_bytes, floor_rounds + WARM_UP_ROUNDS)
    floor = every[WARM_UP_ROUNDS:]
    rows = [row(f"{cell}: bare gRPC", floor, UNIT)]
    cases: dict[str, tuple[str, int, dict[str, str]]] = {"stream": ("stream", rounds, {})}
    if cell == SMALL:
        cases["Flower's messages"] = ("messages", 2 if quick else 11, {})
    else:
        cases["stream, bfloat16"] = ("stream", rounds, {"wire-dtype": "bfloat16"})
    for name, (engine, count, settings) in cases.items():
        warm_up = 1 if engine == "messages" else WARM_UP_ROUNDS
        try:
            parts: Parts = rounds_of(engine, cell, count, warm_up, settings=settings)
        except NotRunError as error:
            rows.append(not_run(f"{cell}: engine, {name}", str(error), UNIT))
            continue
        rows.append(row(f"{cell}: engine, {name}", parts["engine"], UNIT, floor, "bare gRPC"))
        rows.append(row(f"{cell}: round, {name}", parts["round"], UNIT))
    return rows


if __name__ == "__main__":
    main(measure, __doc__)
