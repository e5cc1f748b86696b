"""Measure the seconds per step of each worker: alone, then while all workers compute."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from flwr.app import ArrayRecord, Message

from ..algorithm.averaging import LoadWeighting, weighted_average
from ..algorithm.epoch_plan import RoundShape
from ..config import RunConfig
from ..errors import UsageError
from ..grids.local_grid import LocalGrid
from ..grids.worker_spec import cores_note, parse_workers
from ..protocol import Failure, TrainOrder, TrainReport
from ..results.speed_profile import (
    ProfileKey,
    SpeedProfile,
    Spread,
    WorkerSpeed,
    profile_key,
    refuse_unwritable,
    worker_name,
)
from ..run import check_workers, load_own_task, make_local_grid
from ..strategy.messages import answer_of, replies_to
from ..strategy.speeds import measure_rounds, query_speeds
from ..worker.model_io import state_record

_REPEATS = 5
_ALONE_SECONDS = 0.5
_ROUND_SECONDS = 0.7
_TIMEOUT_SECONDS = 600.0


def profile_path(config: RunConfig) -> Path:
    """Return the file of a speed profile: the one in the settings, else one named after them."""
    return Path(config.profile or f"profiles/{config.name}.json")


def calibrate(config: RunConfig, again: bool, log: Callable[[str], object]) -> SpeedProfile:
    """Measure the speeds of the workers and write them to `profile_path`.

    A profile that still applies is read instead, unless `again` is set. UsageError if the file
    cannot be read or written, the settings cannot be used, or a worker fails.
    """
    path, config = profile_path(config), replace(config, profile="")
    refuse_unwritable(path)
    if path.exists() and not again:
        try:
            profile = SpeedProfile.read(path)
        except UsageError as error:
            reason = str(error).partition(";")[0]
            raise UsageError(f"{reason}; --again measures and replaces it") from None
        reason = profile.mismatch(profile_key(config), parse_workers(config.workers))
        if not reason:
            log(f"measured before, in {path}; --again measures again")
            return profile
        log(f"{path} does not apply: {reason}; measuring again")
    profile = measure_speeds(config, log)
    profile.write(path)
    return profile


def measure_speeds(config: RunConfig, log: Callable[[str], object]) -> SpeedProfile:
    """Return the measured speeds of the workers that the settings name.

    UsageError if the settings cannot be used or a worker fails.
    """
    # A worker reports a speed that it was given instead of measuring it.
    workers = [replace(worker, seconds_per_step=0.0) for worker in parse_workers(config.workers)]
    task = load_own_task(config)
    check_workers(config, workers, task.num_train)
    if note := cores_note(workers):
        log(note)
    arrays = state_record(task.fresh_model(0))
    with make_local_grid(config, workers=workers) as grid:
        return measure(grid, profile_key(config), arrays, task.num_train, log)


def measure(
    grid: LocalGrid,
    key: ProfileKey,
    arrays: ArrayRecord,
    num_samples: int,
    log: Callable[[str], object],
) -> SpeedProfile:
    """Measure the seconds per step of every worker of a grid.

    First each worker alone: five measurements of about half a second, after one that is not
    counted. Then rounds as in training: all workers compute at the same time and for about as
    long, and the models are averaged; the first round is not counted. The orders have made-up
    samples, and keep neither momentum nor the changed model.

    UsageError if a worker fails, does not reply in time, or does not measure.
    """
    sizes = [worker.batch_size or key["batch_size"] for worker in grid.workers]
    labels = {
        node: f"worker {number} of {len(grid.workers)} ({worker.device_with_cores})"
        for number, (node, worker) in enumerate(
            zip(grid.get_node_ids(), grid.workers, strict=True), 1
        )
    }
    alone = []
    for (node, label), size in zip(labels.items(), sizes, strict=True):
        log(f"{label}, alone")
        measured = []
        for _ in range(1 + _REPEATS):
            seconds = query_speeds(grid, {(node, None): size}, _ALONE_SECONDS)[node, None]
            if isinstance(seconds, str):
                raise UsageError(f"the speed of {label} cannot be measured: {seconds}")
            measured.append(seconds)
        alone.append(_spread(measured[1:]))  # the first starts processes, loads data and warms up
    log(f"all {len(labels)} workers together")

    longest = max(_ROUND_SECONDS, *(speed.median for speed in alone))
    steps = [max(1, round(longest / speed.median)) for speed in alone]

    def do_round(orders: list[TrainOrder]) -> list[TrainReport]:
        messages = [
            Message(order.to_records(), node, "train")
            for node, order in zip(labels, orders, strict=True)
        ]
        by_node, reports = replies_to(grid, messages, _TIMEOUT_SECONDS), []
        for (node, label), order in zip(labels.items(), orders, strict=True):
            answer = answer_of(by_node.get(node))
            if isinstance(answer, Failure):
                raise UsageError(f"{label} failed during the measurement: {answer.brief}")
            reports.append(TrainReport.from_content(answer, order))
        weighted_average(
            [{name: a.numpy() for name, a in report.arrays.items()} for report in reports],
            LoadWeighting().weights(steps),
        )
        return reports

    shape = RoundShape(tuple(steps), tuple(sizes))
    rows = measure_rounds(do_round, arrays, shape, num_samples, _REPEATS, _REPEATS)
    *loaded, overhead = (_spread(column) for column in zip(*rows, strict=True))
    workers = tuple(
        WorkerSpeed(worker_name(worker), by_itself, with_others)
        for worker, by_itself, with_others in zip(grid.workers, alone, loaded, strict=True)
    )
    return SpeedProfile(key, workers, overhead)


def _spread(seconds: Sequence[float]) -> Spread:
    return Spread(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
