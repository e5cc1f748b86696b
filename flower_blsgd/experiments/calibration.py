"""Measure the seconds per step of each worker: alone, then while all workers compute."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord

from ..algorithm.averaging import LoadWeighting
from ..algorithm.epoch_plan import RoundShape
from ..algorithm.local_steps import Clock
from ..config import RunConfig
from ..devices.worker_spec import WorkerSpec, cores_note, parse_workers
from ..engines.local.grid import LocalGrid
from ..errors import UsageError
from ..parts import check_workers, make_local_grid
from ..protocol import Keys, WorkerProfile
from ..strategy.averaging import Averaging
from ..strategy.connector import measure_rounds, query_speeds
from ..strategy.workers import Worker
from ..worker.model_io import state_record
from ..workload import load_own_task

_REPEATS = 5
_ALONE_SECONDS = 0.5
_ROUND_SECONDS = 0.7


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of several measured times, in seconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Return that of these times."""
        return cls(statistics.median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class Speeds:
    """Seconds per step of each worker with its batch, its slowdown included.

    `alone` is measured while no other worker computes, `loaded` while all workers do. `overhead` is
    the time of a round in addition to the computing of its slowest worker.
    """

    alone: Sequence[Spread]
    loaded: Sequence[Spread]
    overhead: Spread

    def given_to(self, workers: Sequence[WorkerSpec], clock: Clock) -> list[WorkerSpec]:
        """Return the workers with these speeds, on the wall clock with those under load.

        A worker with a given speed keeps it, since it may represent hardware that is not here.
        """
        return [
            worker
            if worker.seconds_per_step
            else replace(
                worker,
                seconds_per_step=_rounded(alone if clock == "device" else loaded),
                seconds_per_step_alone=_rounded(alone),
            )
            for worker, alone, loaded in zip(workers, self.alone, self.loaded, strict=True)
        ]


def _rounded(seconds: Spread) -> float:
    return float(f"{seconds.median:.4g}")


def without_speeds(workers: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """Return the workers without given speeds."""
    return [replace(w, seconds_per_step=0.0, seconds_per_step_alone=0.0) for w in workers]


def measure_speeds(config: RunConfig, log: Callable[[str], object]) -> Speeds:
    """Return the measured speeds of the workers that the settings name.

    UsageError if the settings cannot be used or a worker fails.
    """
    # A worker reports a speed that it was given instead of measuring it.
    workers = without_speeds(parse_workers(config.workers))
    task = load_own_task(config)
    check_workers(config, workers, task.num_train)
    if note := cores_note(workers):
        log(note)
    arrays = state_record(task.fresh_model(0))
    with make_local_grid(config, workers=workers) as grid:
        return measure(grid, config.batch_size, arrays, task.num_train, log)


def measure(
    grid: LocalGrid,
    batch_size: int,
    arrays: ArrayRecord,
    num_samples: int,
    log: Callable[[str], object],
) -> Speeds:
    """Measure the seconds per step of every worker of a grid.

    First each worker alone: five measurements of about half a second, after one that is not
    counted. Then rounds as in training: all workers compute at the same time and for about as
    long, and the models are averaged; the first round is not counted. The orders have made-up
    samples, and keep neither momentum nor the changed model.

    UsageError if a worker fails, does not reply in time, or does not measure.
    """
    sizes = [worker.batch_size or batch_size for worker in grid.workers]
    labels: dict[int, str] = {}
    alone = []
    for node, worker, size in zip(grid.get_node_ids(), grid.workers, sizes, strict=True):
        number = f"worker {len(labels) + 1} of {len(grid.workers)}"
        labels[node] = label = f"{number} ({worker.device_with_cores})"
        log(f"{label}, alone")
        measured = []
        for _ in range(1 + _REPEATS):
            seconds = query_speeds(grid, {(node, None): size}, _ALONE_SECONDS)[node, None]
            if isinstance(seconds, str):
                raise UsageError(f"the speed of {label} cannot be measured: {seconds}")
            measured.append(seconds)
        alone.append(Spread.of(measured[1:]))  # the first starts processes, loads data and warms up
    log(f"all {len(labels)} workers together")

    longest = max(_ROUND_SECONDS, *(speed.median for speed in alone))
    steps = [max(1, round(longest / speed.median)) for speed in alone]

    workers = [
        Worker(rank, node, WorkerProfile.of(spec, rank))
        for rank, (node, spec) in enumerate(zip(labels, grid.workers, strict=True))
    ]
    rows, failed = measure_rounds(
        grid,
        workers,
        arrays,
        RoundShape(tuple(steps), tuple(sizes)),
        num_samples,
        Averaging(LoadWeighting()),
        Keys(),
        _REPEATS,
        _REPEATS,
    )
    for outcome in failed:
        if outcome.failure:
            label, reason = labels[outcome.worker.node_id], outcome.failure.brief
            raise UsageError(f"{label} failed during the measurement: {reason}")
    *loaded, overhead = (Spread.of(column) for column in zip(*rows, strict=True))
    return Speeds(alone, loaded, overhead)
