"""Checks of the speed of orders: against a hand-written loop, by precision, and compiled."""

import gc
import logging
import warnings

import torch

from flower_blsgd.devices.worker_spec import Precision

from ..bare_loops import bare_loop
from ..models import DISTILBERT, RESNET20, WRN_16_8, Workload
from ..rows import not_run, row, with_goal
from ..step import data_of, local_sgd, paired, rows_of, take_turns
from .card import run_tests
from .lines import CARD, IS_DRY_RUN, Lines

WORKLOADS = (RESNET20,) if IS_DRY_RUN else (RESNET20, WRN_16_8, DISTILBERT)
COMPILED: list[tuple[Workload, Precision]] = [(RESNET20, "float32")]
if not IS_DRY_RUN:
    COMPILED += [(RESNET20, "bfloat16"), (DISTILBERT, "bfloat16")]
COMPILED_GOAL = 4.0
"""Of ResNet20 with batches of 32 in float32: speed over that of the eager loop."""

_DEVICE = torch.device(CARD)

_PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16", "ieee", "tf32")
"""The last two change torch's flags for the whole process, which the others leave alone."""


def steps(lines: Lines) -> None:
    """Compare orders with a hand-written loop, and each precision with the default."""
    default: dict[str, float] = {}
    for precision in _PRECISIONS:
        for workload in WORKLOADS:
            try:
                rows = rows_of(workload, _DEVICE, _shape(workload.cuda), 5, precision)
            except Exception as error:  # the next is measured all the same
                rows = [not_run(f"{workload.name} ({precision})", repr(error)[:300])]
            lines.rows(rows)
            value = rows[-1]["value"]
            if precision == "float32":
                default[workload.name] = value
            elif value and default[workload.name]:
                ratio = round(value / default[workload.name], 3)
                lines.fact(f"{workload.name}: {precision} against float32", ratio=ratio)


def compiled(lines: Lines) -> None:
    """Compare orders with `compile` with an eager loop; nothing may run eagerly instead."""
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flower_blsgd").addHandler(handler)
    for workload, precision in COMPILED:
        name = f"{workload.name}, compiled ({_DEVICE.type}, {precision})"
        if workload.obstacle:
            lines.rows([not_run(name, workload.obstacle)])
            continue
        shape = _shape(workload.cuda)
        data = data_of(workload, shape)
        case = workload, data, _DEVICE, shape[0], precision
        competitors = {"bare loop": bare_loop(*case), "LocalSGD": local_sgd(*case, compiled=True)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seconds = take_turns(competitors, len(data[1]), shape, 5)
        speeds = {who: [shape[0] * shape[1] / s for s in s_[1:]] for who, s_ in seconds.items()}
        ours, bare = speeds["LocalSGD"], speeds["bare loop"]
        made = paired(name, f"{workload.item} per s", ours, bare, "bare loop, eager")
        if workload is RESNET20 and precision == "float32":
            made = with_goal(made, at_least=COMPILED_GOAL, of="ratio")
        lines.rows([made, row(f"{name}: first order", seconds["LocalSGD"][:1], "s")])
        said = sorted({f"{w.category.__name__}: {str(w.message)[:200]}" for w in caught})
        lines.expect(f"{name}: was compiled", not logged, logged=logged[:3], warnings=said)
        logged.clear()
        del competitors
        gc.collect()


def compiled_tests(lines: Lines) -> None:
    """Run the tests of torch.compile."""
    run_tests(lines, "compil")


def _shape(on_card: tuple[int, int]) -> tuple[int, int]:
    """Return batch size and steps of a turn."""
    return (8, 2) if IS_DRY_RUN else (on_card[0], min(on_card[1], 24))
