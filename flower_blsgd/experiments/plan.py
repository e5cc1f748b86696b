"""Predict what every algorithm would do on given workers, without training, as tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from ..config import RunConfig
from ..devices.worker_spec import WorkerSpec, parse_workers
from ..errors import UsageError
from ..parts import make_strategy
from ..protocol import WorkerProfile
from ..results.tables import UNKNOWN, Table, brief, share_text
from ..strategy.cost_model import Prediction, predict_run, slow_device_lines
from ..strategy.evaluation import FORWARD_PER_STEP
from ..strategy.round_metrics import WorkerRound
from ..strategy.workers import Worker, WorkerRegistry
from ..workload import load_own_task
from .calibration import Speeds, Spread, measure_speeds
from .compare import refuse_unknown


@dataclass(frozen=True)
class Plan:
    """Predictions for several algorithms.

    `workers` have a tier and a speed ratio. `expected` has, by algorithm in the given order, a
    prediction or one line on why the settings are refused. `slow_devices` says what each slow
    device is best used for, by the first algorithm that is not refused. `source` says where the
    speeds are from.
    """

    workers: tuple[Worker, ...]
    expected: dict[str, Prediction | str]
    slow_devices: Sequence[str]
    source: str = ""


def plan(
    config: RunConfig,
    algorithms: Sequence[str],
    num_samples: int | None,
    log: Callable[[str], object],
) -> Plan:
    """Predict runs of several algorithms with these settings.

    ``workers`` may name devices that are not here, if all have a speed; otherwise the workers are
    measured. `num_samples` is N, by default that of the task. UsageError if a speed cannot be
    measured, or a setting or an argument cannot be used.
    """
    refuse_unknown(algorithms)
    if num_samples is not None and num_samples < 1:
        raise UsageError(f"num_samples = {num_samples} must be at least 1")
    workers = parse_workers(config.workers, anywhere=True)
    overhead, source = 0.0, "the given seconds per step"
    if not all(worker.seconds_per_step for worker in workers):
        try:
            workers = parse_workers(config.workers)
        except UsageError as error:
            other = "to plan for other devices, give every worker seconds-per-step="
            raise UsageError(f"{error}; {other}") from None
        speeds = measure_speeds(config, log)
        workers = speeds.given_to(workers, config.clock)
        overhead, source = speeds.overhead.median, "the measured seconds per step"
    num_test = 0
    if num_samples is None:
        task = load_own_task(config)
        num_samples, num_test = task.num_train, task.num_test
    found = plan_runs(config, workers, num_samples, algorithms, overhead, num_test)
    source += f"; clock = {config.clock}, {num_samples:,} samples per epoch"
    return replace(found, source=source)


def plan_runs(
    config: RunConfig,
    workers: Sequence[WorkerSpec],
    num_samples: int,
    algorithms: Sequence[str],
    overhead_seconds: float = 0.0,
    num_test: int = 0,
) -> Plan:
    """Predict runs on workers whose speeds are all known.

    `overhead_seconds` is the time of a round in addition to computing. `num_test` is the size of
    the test set, 0 if unknown.
    """
    profiles = [WorkerProfile.of(worker, position) for position, worker in enumerate(workers)]
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
            expected[name] = found or "a speed is unknown"
            weighting = strategy.averaging.weighting
            devices = devices or slow_device_lines(speeds, size, weighting, evaluated)
        except UsageError as error:
            expected[name] = str(error)
    return Plan(tuple(registry.workers), expected, devices)


# --- tables for a terminal


def plan_table(plan: Plan) -> RenderableType:
    """Return a table with the prediction for each algorithm."""
    header = ("algorithm", "local\nsteps", "slow:\nweight", "rounds\n/epoch", "s/round", "s/epoch")
    rows, refused = [], []
    for name, found in plan.expected.items():
        if isinstance(found, str):
            rows.append([name, "refused", *[UNKNOWN] * 7])
            refused.append(f"{name}: {found}")
            continue
        same = len({_batch_size(row) for row in found.workers}) == 1
        steps = [  # "32 of 16": 32 steps, each with 16 samples
            str(row.local_steps) if same else f"{row.local_steps} of {_batch_size(row)}"
            for row in found.workers
        ]
        slow = [row.weight for row in found.workers if not row.fast]
        rows.append(
            [
                name,
                _join_equal(steps),
                f"{sum(slow):.1%}" if slow else UNKNOWN,
                f"{found.rounds_per_epoch:.1f}",
                brief(found.round_seconds),
                brief(found.epoch_seconds),
                share_text(found.waiting_share(fast=True)),
                share_text(found.waiting_share(fast=False)),
                f"{found.samples_per_second:,.0f}",
            ]
        )
    table = Table((*header, "fast\nwaits", "slow\nwaits", "samples\n/s"), rows)
    lines = [*refused, *slow_device_notes(plan)]
    return Group(Text(f"expected, from {plan.source}"), table.terminal(), *map(Text, lines))


def speed_table(speeds: Speeds, workers: Sequence[WorkerSpec], config: RunConfig) -> RenderableType:
    """Return a table with the measured speed of each worker.

    `workers` have the speeds that count on the clock of the settings; gamma follows from them.
    """
    rows = [
        [
            worker.label,
            _milliseconds(speeds.alone[worker.profile.partition_id]),
            _milliseconds(speeds.loaded[worker.profile.partition_id]),
            f"{worker.speed_ratio:.3g}" if worker.speed_ratio else UNKNOWN,
        ]
        for worker in plan_runs(config, workers, 1, []).workers
    ]
    table = Table(("worker", "alone", "all together", f"gamma ({config.clock} clock)"), rows)
    title = "milliseconds per step: median (lowest to highest)"
    overhead = f"overhead of a round: {_milliseconds(speeds.overhead)} ms"
    return Group(title, table.terminal(), Text(overhead))


def slow_device_notes(plan: Plan) -> list[str]:
    """Return lines on what the slow devices can add, and what each is best used for."""
    by_weights: dict[str, list[str]] = {}
    for name, found in plan.expected.items():
        if isinstance(found, Prediction) and len({row.fast for row in found.workers}) == 2:
            by_weights.setdefault(f"{found.best_speed_up:.2f}", []).append(name)
    each = "; ".join(f"{times} ({', '.join(names)})" for times, names in by_weights.items())
    bound = (
        "largest speed-up over the fast devices alone that the weights allow, each at its best "
        f"learning rate: {each}"
    )
    return [*([bound] if each else []), *plan.slow_devices]


def _join_equal(cells: Sequence[str]) -> str:
    """Join cells to a text, equal neighbours written once.

    >>> _join_equal(["32", "32", "1"])
    '2x 32, 1'
    """
    counts = [(len(list(group)), cell) for cell, group in groupby(cells)]
    return ", ".join(f"{count}x {cell}" if count > 1 else cell for count, cell in counts)


def _batch_size(row: WorkerRound) -> int:
    return row.num_examples // row.local_steps


def _milliseconds(spread: Spread) -> str:
    low, high = spread.low * 1000, spread.high * 1000
    return f"{spread.median * 1000:.3g} ({low:.3g} to {high:.3g})"
