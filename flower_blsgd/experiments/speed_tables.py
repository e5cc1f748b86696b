"""Tell speeds and plans: tables for a terminal, and what they mean in words."""

from collections.abc import Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .plan import Plan, PlanRow
from .speed_profile import SpeedProfile, Spread

_HARDLY_WEIGHT = 0.01
_HARDLY_FASTER = 1.02


def speed_table(profile: SpeedProfile, plan: Plan, row: PlanRow, clock: str) -> RenderableType:
    """Return what was measured of every worker, and what it will do.

    Parameters
    ----------
    profile : SpeedProfile
        The measurement.
    plan : Plan
        Made with it.
    row : PlanRow
        The algorithm that will run.
    clock : str
        Which of the two speeds counts.
    """
    table = _table("worker", gap=1)
    for column in ("alone", "all at once", "gamma", "steps", "weight", "waits"):
        table.add_column(column, justify="right", no_wrap=column != "steps")
    places = {worker.index: place for place, worker in enumerate(row.workers)}
    for worker in plan.workers:
        measured = profile.workers[worker.profile.partition_id]
        cells = ["-", "-", "-"]
        if row.prediction is not None and worker.index in places:
            place = places[worker.index]
            steps, batch = row.prediction.local_steps[place], row.prediction.batch_sizes[place]
            shrunk = "" if batch == profile.key.batch_size else f" of {batch}"
            cells = [
                f"{steps}{shrunk}",
                f"{row.prediction.weights[place]:.1%}",
                f"{row.prediction.waiting_shares[place]:.0%}",
            ]
        table.add_row(
            worker.label,
            _milliseconds(measured.alone),
            _milliseconds(measured.loaded),
            f"{worker.speed_ratio or 0:.3g}",
            *cells,
        )
    title = "milliseconds per step: median (lowest to highest)"
    lines = [
        f"{row.algorithm}, clock = {clock}: gamma, steps, weight and waiting come from "
        + ("each worker alone" if clock == "device" else "all computing at once"),
        f"beside computing a round takes {_milliseconds(profile.overhead_seconds)} ms",
        *([row.refusal] if row.refusal else []),
        *in_words(plan, row),
    ]
    return Group(title, table, *(Text(line) for line in lines))


def plan_table(plan: Plan, predicted_for: str) -> RenderableType:
    """Return what to expect of every algorithm.

    Parameters
    ----------
    plan : Plan
        What to expect.
    predicted_for : str
        Where the speeds are from, in words.
    """
    table = _table("algorithm", gap=0)
    table.add_column("local\nsteps", justify="right", min_width=6)
    for column in ("slow:\nweight", "rounds\n/epoch", "s/round", "s/epoch"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("fast\nwaits", "slow\nwaits", "samples\n/s"):
        table.add_column(column, justify="right", no_wrap=True)
    refused = []
    for row in plan.rows:
        found = row.prediction
        if found is None:
            table.add_row(row.algorithm, "refused", *["-"] * 7)
            refused.append(f"{row.algorithm}: {row.refusal}")
            continue
        same = len(set(found.batch_sizes)) == 1
        steps = [
            str(s) if same else f"{s} of {b}"  # a step of so many samples
            for s, b in zip(found.local_steps, found.batch_sizes, strict=True)
        ]
        table.add_row(
            row.algorithm,
            _by_kind(steps),
            _slow_weight(row),
            f"{found.rounds_per_epoch:.1f}",
            f"{found.round_seconds:.3g}",
            f"{found.epoch_seconds:.3g}",
            _share(found.fast_waiting_share),
            _share(found.slow_waiting_share),
            f"{found.samples_per_second:,.0f}",
        )
    first = next((row for row in plan.rows if row.prediction is not None), PlanRow(""))
    lines = [*refused, *in_words(plan, first)]
    title = Text(f"expected, from {predicted_for}")
    return Group(title, table, *(Text(line) for line in lines))


def in_words(plan: Plan, row: PlanRow) -> list[str]:
    """Say plainly what the slow devices can add, and which hardly take part."""
    lines = []
    if plan.ceiling is not None and any(not worker.fast for worker in plan.workers):
        lines.append(
            f"ceiling: all devices together can do at most {plan.ceiling:.2f} times the samples "
            "per second of the fast ones alone, whatever the algorithm"
        )
        if plan.ceiling < _HARDLY_FASTER:
            lines.append("so the slow devices hardly help: less than 2 % more samples per second")
    if row.prediction is not None:
        for worker, weight in zip(row.workers, row.prediction.weights, strict=True):
            if weight < _HARDLY_WEIGHT:
                lines.append(
                    f"{worker.label} hardly takes part: its weight is {weight:.2%} with "
                    f"{row.algorithm}"
                )
    return lines


def _table(first: str, gap: int) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, gap, 0, 0))
    table.add_column(first, no_wrap=True)
    return table


def _slow_weight(row: PlanRow) -> str:
    """Return the weight of all slow workers together."""
    assert row.prediction is not None
    pairs = list(zip(row.workers, row.prediction.weights, strict=True))
    if all(worker.fast for worker, _ in pairs):
        return "-"
    return f"{sum(weight for worker, weight in pairs if not worker.fast):.1%}"


def _by_kind(cells: Sequence[str]) -> str:
    """Write equal neighbours once.

    >>> _by_kind(["32", "32", "1"])
    '2x 32, 1'
    """
    parts = []
    for cell, group in groupby(cells):
        count = len(list(group))
        parts.append(f"{count}x {cell}" if count > 1 else cell)
    return ", ".join(parts)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _milliseconds(spread: Spread) -> str:
    low, high = spread.low * 1000, spread.high * 1000
    return f"{spread.median * 1000:.3g} ({low:.3g} to {high:.3g})"
