"""Speeds and overhead, measured in rounds as training has them."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord

from ..algorithm.epoch_plan import RoundShape
from ..protocol import TrainOrder
from .replies import Outcome
from .workers import Worker

_FEWEST_ROUNDS, _MOST_ROUNDS, _MEASURED_SECONDS = 4, 30, 3.0


@dataclass(frozen=True)
class MeasuredRounds:
    """What rounds took.

    Parameters
    ----------
    seconds_per_step : tuple of float
        Of each worker that trains, in worker order, with the batch size that was measured.
    overhead_seconds : float
        Of one round: everything except the longest computing.
    """

    seconds_per_step: tuple[float, ...]
    overhead_seconds: float


def measure_rounds(
    do_round: Callable[[list[tuple[Worker, TrainOrder]]], Sequence[Outcome]],
    arrays: ArrayRecord,
    workers: Sequence[Worker],
    shape: RoundShape,
    num_samples: int,
) -> MeasuredRounds | None:
    """Measure rounds that leave nothing behind; None if an order fails.

    All workers compute at once, with cold caches after every wait and slowed as they are, and the
    models are averaged; only the learning rate is 0. Results are lower quartiles: what disturbs a
    round makes it longer, so they vary less from start to start than medians. The rounds take about
    three seconds, less where rounds are short: at least four and at most thirty of them, after one
    to warm up.

    Parameters
    ----------
    do_round : callable
        Sends the orders, averages the models, and returns the outcomes in worker order.
    arrays : ArrayRecord
        The global model.
    workers : sequence of Worker
        All that train.
    shape : RoundShape
        Their local steps and batch sizes.
    num_samples : int
        N.
    """
    computing: list[list[float]] = []
    overheads: list[float] = []
    total = 0.0
    while len(overheads) <= _FEWEST_ROUNDS or (
        len(overheads) <= _MOST_ROUNDS and total < _MEASURED_SECONDS
    ):
        began = time.perf_counter()
        orders = []
        for worker, steps, size in zip(workers, shape.local_steps, shape.batch_sizes, strict=True):
            draw = np.random.default_rng([worker.index, len(overheads)])  # no sample is cached
            order = TrainOrder.to_measure(steps, size, num_samples, arrays, draw)
            orders.append((worker, order))
        reports = [outcome.report for outcome in do_round(orders)]
        seconds = [report.compute_seconds if report else 0.0 for report in reports]
        if not all(seconds):
            return None
        took = time.perf_counter() - began
        computing.append([s / n for s, n in zip(seconds, shape.local_steps, strict=True)])
        overheads.append(took - max(seconds))
        total += took if len(overheads) > 1 else 0.0
    by_worker = zip(*computing[1:], strict=True)
    return MeasuredRounds(tuple(map(_lower_quartile, by_worker)), _lower_quartile(overheads[1:]))


def _lower_quartile(values: Iterable[float]) -> float:
    return float(np.quantile(list(values), 0.25))
