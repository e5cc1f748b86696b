"""Predict what every algorithm would do on given workers, without training, as tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..config import RunConfig
from ..errors import UsageError
from ..results.metrics import HARDLY
from ..results.speed_profile import SpeedProfile, Spread
from ..run import make_strategy
from ..runtime.devices import WorkerSpec
from ..strategy.cost_model import Prediction, predict_run, throughput_ceiling
from ..strategy.workers import Worker, WorkerRegistry
from ..worker.profile import profile_of

_HARDLY_FASTER = 1.02


@dataclass(frozen=True)
class PlanRow:
    """What to expect of one algorithm, or in one line why its settings are refused."""

    algorithm: str
    prediction: Prediction | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Plan:
    """What to expect of several algorithms.

    Attributes
    ----------
    workers : tuple of Worker
        All workers, with tier and speed ratio.
    rows : tuple of PlanRow
        In the order in which the algorithms were named.
    ceiling : float, optional
        How many times the samples per second of the fast workers all workers can do, at best.
    """

    workers: tuple[Worker, ...]
    rows: tuple[PlanRow, ...]
    ceiling: float | None


def plan_runs(
    config: RunConfig,
    workers: Sequence[WorkerSpec],
    num_samples: int,
    algorithms: Sequence[str],
    overhead_seconds: float = 0.0,
) -> Plan:
    """Predict runs of several algorithms.

    Parameters
    ----------
    config : RunConfig
        The settings; its algorithm is replaced by each in turn.
    workers : sequence of WorkerSpec
        All with seconds per step.
    num_samples : int
        N.
    algorithms : sequence of str
        Names of the catalog.
    overhead_seconds : float (default: 0)
        Of one round.
    """
    profiles = [profile_of(worker, position) for position, worker in enumerate(workers)]
    ranked = tuple(WorkerRegistry.of_profiles(profiles, config.fast_threshold).workers)
    rows = []
    for name in algorithms:
        try:
            strategy = make_strategy(replace(config, algorithm=name), num_samples, len(ranked))
            rows.append(PlanRow(name, predict_run(strategy, ranked, overhead_seconds)))
        except UsageError as error:
            rows.append(PlanRow(name, refusal=str(error)))
    return Plan(ranked, tuple(rows), throughput_ceiling(ranked))


def plan_table(plan: Plan, source: str) -> RenderableType:
    """Return a table of what to expect of every algorithm, for a terminal.

    The source says in words where the speeds are from.
    """
    headers = ("local\nsteps", "slow:\nweight", "rounds\n/epoch", "s/round", "s/epoch")
    table = _table(0, "algorithm", *headers, "fast\nwaits", "slow\nwaits", "samples\n/s")
    lines = []
    for row in plan.rows:
        found = row.prediction
        if found is None:
            table.add_row(row.algorithm, "refused", *["-"] * 7)
            lines.append(f"{row.algorithm}: {row.refusal}")
            continue
        same = len(set(found.batch_sizes)) == 1
        steps = [
            str(s) if same else f"{s} of {b}"  # a step of so many samples
            for s, b in zip(found.local_steps, found.batch_sizes, strict=True)
        ]
        weights = zip(found.workers, found.weights, strict=True)
        slow = [weight for worker, weight in weights if not worker.fast]
        table.add_row(
            row.algorithm,
            _join_equal(steps),
            f"{sum(slow):.1%}" if slow else "-",
            f"{found.rounds_per_epoch:.1f}",
            f"{found.round_seconds:.3g}",
            f"{found.epoch_seconds:.3g}",
            _share(found.fast_waiting_share),
            _share(found.slow_waiting_share),
            f"{found.samples_per_second:,.0f}",
        )
    first = next((row for row in plan.rows if row.prediction is not None), plan.rows[0])
    lines += slow_device_notes(plan, first)
    return Group(Text(f"expected, from {source}"), table, *map(Text, lines))


def speed_table(profile: SpeedProfile, plan: Plan, row: PlanRow, clock: str) -> RenderableType:
    """Return a table of each worker's measured speed and what it will do, for a terminal.

    Parameters
    ----------
    profile : SpeedProfile
        The measurement; the plan was made with it.
    plan, row : Plan, PlanRow
        What to expect, and the one of its rows that will run.
    clock : str
        Which of the two speeds counts.
    """
    table = _table(1, "worker", "alone", "all at once", "gamma", "steps", "weight", "waits")
    found = row.prediction
    for worker in plan.workers:
        measured = profile.workers[worker.profile.partition_id]
        cells = ["-", "-", "-"]
        if found is not None and worker in found.workers:
            position = found.workers.index(worker)
            batch = found.batch_sizes[position]
            shrunk = "" if batch == profile.key.batch_size else f" of {batch}"
            cells = [
                f"{found.local_steps[position]}{shrunk}",
                f"{found.weights[position]:.1%}",
                f"{found.waiting_shares[position]:.0%}",
            ]
        speeds = _milliseconds(measured.alone), _milliseconds(measured.loaded)
        table.add_row(worker.label, *speeds, f"{worker.speed_ratio or 0:.3g}", *cells)
    lines = [
        f"{row.algorithm}, clock = {clock}: gamma, steps, weight and waiting come from "
        + ("each worker alone" if clock == "device" else "all computing at once"),
        f"beside computing a round takes {_milliseconds(profile.overhead_seconds)} ms",
        *([row.refusal] if row.refusal else []),
        *slow_device_notes(plan, row),
    ]
    return Group("milliseconds per step: median (lowest to highest)", table, *map(Text, lines))


def slow_device_notes(plan: Plan, row: PlanRow) -> list[str]:
    """Return lines that say what the slow devices can add, and which workers hardly take part."""
    lines = []
    if plan.ceiling is not None and any(not worker.fast for worker in plan.workers):
        lines.append(
            f"ceiling: all devices together can do at most {plan.ceiling:.2f} times the samples "
            "per second of the fast ones alone, whatever the algorithm"
        )
        if plan.ceiling < _HARDLY_FASTER:
            lines.append("so the slow devices hardly help: less than 2 % more samples per second")
    if row.prediction is not None:
        lines += [
            f"{worker.label} hardly takes part: its weight is {weight:.2%} with {row.algorithm}"
            for worker, weight in zip(row.prediction.workers, row.prediction.weights, strict=True)
            if weight < HARDLY
        ]
    return lines


def _table(gap: int, first: str, *headers: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, gap, 0, 0))
    table.add_column(first, no_wrap=True)
    for header in headers:  # the steps of many workers may take two lines
        steps = header.endswith("steps")
        table.add_column(header, justify="right", no_wrap=not steps, min_width=6 if steps else None)
    return table


def _join_equal(cells: Sequence[str]) -> str:
    """Join cells to a text, equal neighbours written once.

    >>> _join_equal(["32", "32", "1"])
    '2x 32, 1'
    """
    counts = [(len(list(group)), cell) for cell, group in groupby(cells)]
    return ", ".join(f"{count}x {cell}" if count > 1 else cell for count, cell in counts)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _milliseconds(spread: Spread) -> str:
    low, high = spread.low * 1000, spread.high * 1000
    return f"{spread.median * 1000:.3g} ({low:.3g} to {high:.3g})"
