"""Predict what every algorithm would do on given workers, without training, as tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from textwrap import fill

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..config import RunConfig
from ..errors import UsageError
from ..grids.worker_spec import WorkerSpec
from ..results.speed_profile import SpeedProfile, Spread
from ..run import make_strategy
from ..strategy.cost_model import Prediction, predict_run, slow_device_lines
from ..strategy.evaluation import FORWARD_PER_STEP
from ..strategy.round_metrics import WorkerRound
from ..strategy.workers import Worker, WorkerRegistry
from ..worker.profile import profile_of


@dataclass(frozen=True)
class Plan:
    """What to expect of several algorithms.

    Attributes
    ----------
    workers : tuple of Worker
        All workers, with tier and speed ratio.
    expected : dict of str to Prediction or str
        By algorithm, in the order in which they were named; or in one line why its settings are
        refused.
    slow_devices : sequence of str
        What each is worth with the first algorithm that is not refused.
    """

    workers: tuple[Worker, ...]
    expected: dict[str, Prediction | str]
    slow_devices: Sequence[str]


def plan_runs(
    config: RunConfig,
    workers: Sequence[WorkerSpec],
    num_samples: int,
    algorithms: Sequence[str],
    overhead_seconds: float = 0.0,
    num_test: int = 0,
) -> Plan:
    """Predict runs of several algorithms, which replace that of the settings in turn.

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
    num_test : int (default: 0)
        Samples of the test set; 0 if that is not known.
    """
    profiles = [profile_of(worker, position) for position, worker in enumerate(workers)]
    size = config.batch_size
    registry = WorkerRegistry.of_profiles(profiles, config.fast_threshold, size)
    num_training = len(registry.active)
    speeds = [(worker, worker.samples_per_second(size)) for worker in registry.workers]
    evaluated = num_test / FORWARD_PER_STEP / (num_samples * config.evaluate_every_epochs)
    expected: dict[str, Prediction | str] = {}
    devices: list[str] = []
    for name in algorithms:
        try:
            strategy = make_strategy(replace(config, algorithm=name), num_samples, num_training)
            strategy.registry.register({(i, None): p for i, p in enumerate(profiles)})
            found = predict_run(strategy, strategy.registry.active, overhead_seconds)
            expected[name] = found or "a speed is not known"
            weighting = strategy.averaging.weighting
            devices = devices or slow_device_lines(speeds, size, weighting, evaluated)
        except UsageError as error:
            expected[name] = str(error)
    return Plan(tuple(registry.workers), expected, devices)


def plan_table(plan: Plan, source: str) -> RenderableType:
    """Return a table of what to expect of every algorithm, for a terminal.

    The source says in words where the speeds are from.
    """
    headers = ("local\nsteps", "slow:\nweight", "rounds\n/epoch", "s/round", "s/epoch")
    table = _table(0, "algorithm", *headers, "fast\nwaits", "slow\nwaits", "samples\n/s")
    lines = []
    for name, found in plan.expected.items():
        if isinstance(found, str):
            table.add_row(fill(name, 20), "refused", *["-"] * 7)
            lines.append(f"{name}: {found}")
            continue
        same = len({_batch_size(row) for row in found.workers}) == 1
        steps = [  # "32 of 16": steps of so many samples
            str(row.local_steps) if same else f"{row.local_steps} of {_batch_size(row)}"
            for row in found.workers
        ]
        slow = [row.weight for row in found.workers if not row.fast]
        table.add_row(
            fill(name, 20),
            _join_equal(steps),
            f"{sum(slow):.1%}" if slow else "-",
            f"{found.rounds_per_epoch:.1f}",
            f"{found.round_seconds:.3g}",
            f"{found.epoch_seconds:.3g}",
            _share(found.waiting_share(fast=True)),
            _share(found.waiting_share(fast=False)),
            f"{found.samples_per_second:,.0f}",
        )
    lines += slow_device_notes(plan)
    return Group(Text(f"expected, from {source}"), table, *map(Text, lines))


def speed_table(profile: SpeedProfile, plan: Plan, clock: str) -> RenderableType:
    """Return a table of each worker's measured speed and what it will do, for a terminal.

    The plan is made with this profile, of the one algorithm that will run; `clock` says which of
    the two speeds counts.
    """
    table = _table(1, "worker", "alone", "all at once", "gamma", "steps", "weight", "waits")
    ((algorithm, found),) = plan.expected.items()
    rows, seconds = ((), 0.0) if isinstance(found, str) else (found.workers, found.round_seconds)
    trains = {row.worker: row for row in rows}
    for worker in plan.workers:
        measured = profile.workers[worker.profile.partition_id]
        cells = ["-", "-", "-"]
        if row := trains.get(worker.index):
            batch = _batch_size(row)
            shrunk = "" if batch == profile.key["batch_size"] else f" of {batch}"
            waits = row.waiting_seconds / seconds
            cells = [f"{row.local_steps}{shrunk}", f"{row.weight:.1%}", f"{waits:.0%}"]
        speeds = _milliseconds(measured.alone), _milliseconds(measured.loaded)
        table.add_row(worker.label, *speeds, f"{worker.speed_ratio or 0:.3g}", *cells)
    lines = [
        f"{algorithm}, clock = {clock}: gamma, steps, weight and waiting come from "
        + ("each worker alone" if clock == "device" else "all computing at once"),
        f"beside computing a round takes {_milliseconds(profile.overhead_seconds)} ms",
        *([found] if isinstance(found, str) else []),
        *slow_device_notes(plan),
    ]
    return Group("milliseconds per step: median (lowest to highest)", table, *map(Text, lines))


def slow_device_notes(plan: Plan) -> list[str]:
    """Return lines that say what the slow devices can add, and what each is best used for."""
    by_weights: dict[str, list[str]] = {}
    for name, found in plan.expected.items():
        if isinstance(found, Prediction) and len({row.fast for row in found.workers}) == 2:
            by_weights.setdefault(f"{found.best_speed_up:.2f}", []).append(name)
    each = "; ".join(f"{times} ({', '.join(names)})" for times, names in by_weights.items())
    ceiling = (
        "ceiling of the weights: how many times sooner a given loss can be reached than with the "
        f"fast devices alone, each at its best learning rate: {each}"
    )
    return [*([ceiling] if each else []), *plan.slow_devices]


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


def _batch_size(row: WorkerRound) -> int:
    return row.num_examples // row.local_steps


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _milliseconds(spread: Spread) -> str:
    low, high = spread.low * 1000, spread.high * 1000
    return f"{spread.median * 1000:.3g} ({low:.3g} to {high:.3g})"
