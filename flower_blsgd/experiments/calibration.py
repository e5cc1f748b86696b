"""Measure the seconds per step of each worker: alone, then with all of them computing."""

import statistics
from collections.abc import Callable, Sequence

from flwr.app import ArrayRecord, Message

from ..algorithm.averaging import LoadWeighting, weighted_average
from ..algorithm.epoch_plan import RoundShape
from ..errors import UsageError
from ..grids.local_grid import LocalGrid
from ..protocol import Failure, TrainOrder, TrainReport
from ..results.speed_profile import ProfileKey, SpeedProfile, Spread, WorkerSpeed
from ..strategy.messages import answer_of, replies_to
from ..strategy.speeds import measure_rounds, query_speeds

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
    key : dict
        What the speeds will hold for, see `profile_key`.
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
                raise UsageError(f"the speed of {label} is not known: {seconds}")
            measured.append(seconds)
        alone.append(_spread(measured[1:]))  # the first starts processes, loads data and warms up
    log(f"all {len(labels)} workers at once")

    longest = max(_ROUND_SECONDS, *(speed.median for speed in alone))
    steps = [max(1, round(longest / speed.median)) for speed in alone]

    def do_round(orders: list[TrainOrder]) -> list[TrainReport]:
        messages = [
            Message(order.to_records(), node, "train")
            for node, order in zip(labels, orders, strict=True)
        ]
        by_node, reports = replies_to(grid, messages, _TIMEOUT_SECONDS), []
        for (node, label), order in zip(labels.items(), orders, strict=True):
            answer = answer_of(by_node.get(node), None)
            if isinstance(answer, Failure):
                raise UsageError(f"{label} failed while it was measured: {answer.brief}")
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
        WorkerSpeed.of(worker, by_itself, with_others)
        for worker, by_itself, with_others in zip(grid.workers, alone, loaded, strict=True)
    )
    return SpeedProfile(key, workers, overhead)


def _spread(seconds: Sequence[float]) -> Spread:
    return Spread(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
