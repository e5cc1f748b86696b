"""Measure the seconds per step of each worker: alone, then with all of them computing."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord, Message

from ..algorithm.averaging import LoadWeighting, weighted_average
from ..errors import UsageError
from ..protocol import TrainOrder, TrainReport
from ..results.speed_profile import ProfileKey, SpeedProfile, Spread, WorkerSpeed
from ..runtime.local_grid import LocalGrid
from ..strategy.profiles import query_speeds

_REPEATS = 5
_ALONE_SECONDS = 0.5
_ROUND_SECONDS = 0.7
_TIMEOUT_SECONDS = 600.0


def calibrate(
    grid: LocalGrid,
    key: ProfileKey,
    arrays: ArrayRecord,
    num_samples: int,
    log: Callable[[str], object] = lambda _: None,
) -> SpeedProfile:
    """Measure the seconds per step of every worker of a grid.

    First each alone, five times about half a second after a first one that is not counted. Then
    rounds as training has them: every worker computes at the same time and for about as long, and
    the models are averaged; the first round is not counted. All orders have made-up samples and
    leave neither momentum nor a changed model behind.

    Parameters
    ----------
    grid : LocalGrid
        The workers.
    key : ProfileKey
        What the speeds will hold for.
    arrays : ArrayRecord
        A model.
    num_samples : int
        N.
    log : callable
        Takes a line about each measurement before it begins.

    Raises
    ------
    UsageError
        If a worker fails, does not reply in time, or does not measure.
    """
    labels = {
        node: f"worker {number} of {len(grid.workers)} ({worker.device_with_cores})"
        for number, (node, worker) in enumerate(
            zip(grid.get_node_ids(), grid.workers, strict=True), 1
        )
    }
    alone = []
    for node, label in labels.items():
        log(f"{label}, alone")
        _step_seconds(grid, node, label, key.batch_size)  # starts its process, loads data, warms up
        alone.append(
            _spread([_step_seconds(grid, node, label, key.batch_size) for _ in range(_REPEATS)])
        )
    log(f"all {len(labels)} workers at once")
    loaded, overhead = _measure_rounds(grid, labels, key.batch_size, arrays, num_samples, alone)
    workers = tuple(
        WorkerSpeed(worker.device_with_cores, worker.slowdown, by_itself, with_others)
        for worker, by_itself, with_others in zip(grid.workers, alone, loaded, strict=True)
    )
    return SpeedProfile(key, workers, overhead)


def _step_seconds(grid: LocalGrid, node: int, label: str, batch_size: int) -> float:
    seconds = query_speeds(grid, [(node, None)], batch_size, _ALONE_SECONDS)[node, None]
    if isinstance(seconds, str):
        raise UsageError(f"the speed of {label} is not known: {seconds}")
    return seconds


def _measure_rounds(
    grid: LocalGrid,
    labels: Mapping[int, str],
    batch_size: int,
    arrays: ArrayRecord,
    num_samples: int,
    alone: Sequence[Spread],
) -> tuple[list[Spread], Spread]:
    """Return every worker's seconds per step in rounds of all, and the overhead of a round."""
    longest = max(_ROUND_SECONDS, *(speed.median for speed in alone))
    steps = [max(1, round(longest / speed.median)) for speed in alone]
    step_seconds: list[list[float]] = [[] for _ in labels]
    overheads = []
    for repeat in range(1 + _REPEATS):
        began = time.perf_counter()
        orders = {
            node: _order(position, repeat, count, batch_size, arrays, num_samples)
            for position, (node, count) in enumerate(zip(labels, steps, strict=True))
        }
        messages = [Message(order.to_records(), node, "train") for node, order in orders.items()]
        replies = grid.send_and_receive(messages, timeout=_TIMEOUT_SECONDS)
        reports = _reports(replies, orders, labels)
        weighted_average(
            [{name: a.numpy() for name, a in report.arrays.items()} for report in reports],
            LoadWeighting().weights(steps),
        )
        took = time.perf_counter() - began
        if repeat == 0:
            continue
        first = min(report.started_at for report in reports)
        last = max(report.ended_at for report in reports)
        overheads.append(max(0.0, took - (last - first)))
        for seconds, report, count in zip(step_seconds, reports, steps, strict=True):
            seconds.append(report.compute_seconds / count)
    return [_spread(seconds) for seconds in step_seconds], _spread(overheads)


def _order(
    position: int, repeat: int, steps: int, batch_size: int, arrays: ArrayRecord, num_samples: int
) -> TrainOrder:
    """Return an order with samples drawn anew, so that none is in the worker's caches."""
    draw = np.random.default_rng([position, repeat])
    return TrainOrder(
        round=0,
        epoch=0,
        local_steps=steps,
        batch_size=batch_size,
        learning_rate=0.0,
        seed=0,
        deadline_seconds=0.0,
        momentum_policy="reset",
        indices=draw.integers(0, num_samples, steps * batch_size, dtype=np.int32),
        arrays=arrays,
    )


def _reports(
    replies: Iterable[Message], orders: Mapping[int, TrainOrder], labels: Mapping[int, str]
) -> list[TrainReport]:
    """Return what every worker replied, in worker order."""
    by_node = {reply.metadata.src_node_id: reply for reply in replies}
    for node, label in labels.items():
        reason = "no reply"
        if node in by_node:
            if not by_node[node].has_error():
                continue
            error = by_node[node].error
            reason = (error.reason or f"error {error.code}").strip().splitlines()[-1]
        raise UsageError(f"{label} failed while it was measured: {reason}")
    return [TrainReport.from_reply(by_node[node], order) for node, order in orders.items()]


def _spread(seconds: Sequence[float]) -> Spread:
    return Spread(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
