"""Measure what each worker can do: alone, then all of them at once."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord, Message

from ..algorithm.averaging import LoadWeighting, weighted_average
from ..errors import UsageError
from ..profile_query import ask_speeds
from ..protocol import TrainOrder, TrainReport
from ..runtime.local_grid import LocalGrid
from .speed_profile import ProfileKey, SpeedProfile, Spread, WorkerSpeed

_REPEATS = 5
_ALONE_SECONDS = 0.5
_ROUND_SECONDS = 0.7
_TIMEOUT_SECONDS = 600.0


def calibrate(
    grid: LocalGrid,
    key: ProfileKey,
    arrays: ArrayRecord,
    num_samples: int,
    tell: Callable[[str], object] = lambda _: None,
) -> SpeedProfile:
    """Measure the seconds per step of every worker of a grid.

    First each alone, five times about half a second after a first one that is not counted. Then
    rounds as training has them: every worker computes at the same time and for about as long, and
    the models are averaged; the first round is not counted. All orders have made-up samples and
    leave nothing behind.

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
    tell : callable
        Is told what goes on.

    Raises
    ------
    UsageError
        If a worker does not answer as it should.
    """
    nodes = {
        node: f"worker {place} of {len(grid.workers)} ({worker.device_with_cores})"
        for place, (node, worker) in enumerate(
            zip(grid.get_node_ids(), grid.workers, strict=True), 1
        )
    }
    alone = []
    for node, label in nodes.items():
        tell(f"{label}, alone")
        _ask(grid, node, label, key.batch_size)  # starts its process, loads the data, warms up
        repeats = [_ask(grid, node, label, key.batch_size) for _ in range(_REPEATS)]
        alone.append(_spread(repeats))
    tell(f"all {len(nodes)} workers at once")
    loaded, overhead = _rounds(grid, nodes, key.batch_size, arrays, num_samples, alone)
    workers = tuple(
        WorkerSpeed(worker.device_with_cores, worker.slowdown, by_itself, with_others)
        for worker, by_itself, with_others in zip(grid.workers, alone, loaded, strict=True)
    )
    return SpeedProfile(key, workers, overhead)


def _ask(grid: LocalGrid, node: int, label: str, batch_size: int) -> float:
    seconds = ask_speeds(grid, [node], batch_size, _ALONE_SECONDS)[node]
    if isinstance(seconds, str):
        raise UsageError(f"the speed of {label} is not known: {seconds}")
    return seconds


def _rounds(
    grid: LocalGrid,
    nodes: Mapping[int, str],
    batch_size: int,
    arrays: ArrayRecord,
    num_samples: int,
    alone: Sequence[Spread],
) -> tuple[list[Spread], Spread]:
    """Return every worker's seconds per step in rounds of all, and the overhead of a round."""
    longest = max(_ROUND_SECONDS, *(speed.median for speed in alone))
    steps = [max(1, round(longest / speed.median)) for speed in alone]
    found: list[list[float]] = [[] for _ in nodes]
    overheads = []
    for repeat in range(1 + _REPEATS):
        began = time.perf_counter()
        orders = {
            node: _order(place, repeat, count, batch_size, arrays, num_samples)
            for place, (node, count) in enumerate(zip(nodes, steps, strict=True))
        }
        messages = [Message(order.to_records(), node, "train") for node, order in orders.items()]
        replies = grid.send_and_receive(messages, timeout=_TIMEOUT_SECONDS)
        reports = _read(replies, orders, nodes)
        models = [
            {name: array.numpy() for name, array in reports[node].arrays.items()} for node in nodes
        ]
        weighted_average(models, LoadWeighting().weights(steps))
        took = time.perf_counter() - began
        if repeat == 0:
            continue
        computing = [reports[node].compute_seconds for node in nodes]
        first = min(report.started_at for report in reports.values())
        last = max(report.ended_at for report in reports.values())
        overheads.append(max(0.0, took - (last - first)))
        for place, seconds in enumerate(computing):
            found[place].append(seconds / steps[place])
    return [_spread(seconds) for seconds in found], _spread(overheads)


def _order(
    place: int, repeat: int, steps: int, batch_size: int, arrays: ArrayRecord, num_samples: int
) -> TrainOrder:
    draw = np.random.default_rng([place, repeat])
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


def _read(
    replies: Iterable[Message], orders: Mapping[int, TrainOrder], labels: Mapping[int, str]
) -> dict[int, TrainReport]:
    reports = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            reason = (reply.error.reason or f"error {reply.error.code}").strip().splitlines()[-1]
            raise UsageError(f"{labels[node]} failed while it was measured: {reason}")
        reports[node] = TrainReport.from_reply(reply, orders[node])
    missing = orders.keys() - reports.keys()
    if missing:
        raise UsageError(f"{labels[min(missing)]} did not answer while it was measured")
    return reports


def _spread(seconds: Sequence[float]) -> Spread:
    return Spread(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
