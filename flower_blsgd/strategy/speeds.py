"""Speeds and overhead, measured in rounds as training has them."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from flwr.app import ArrayRecord

from ..algorithm.epoch_plan import RoundShape
from ..protocol import TrainOrder, TrainReport

_MEASURED_SECONDS = 3.0


def measure_rounds(
    do_round: Callable[[list[TrainOrder]], Sequence[TrainReport | None]],
    arrays: ArrayRecord,
    shape: RoundShape,
    num_samples: int,
    fewest: int = 4,
    most: int = 30,
) -> list[list[float]]:
    """Return the seconds per step of each worker in each round, and last its overhead seconds.

    All workers compute at once, with cold caches after every wait and slowed as they are; only the
    learning rate is 0. After one round to warm up, rounds are measured for about three seconds. The
    list ends early, perhaps empty, if an order fails.

    Parameters
    ----------
    do_round : callable
        Sends the orders, averages the models, and returns the reports in worker order.
    arrays, shape, num_samples
        The global model, the steps and batch size of each worker, and N.
    fewest, most : int (default: 4, 30)
        Rounds to measure.
    """
    rows: list[list[float]] = []
    until = time.perf_counter() + _MEASURED_SECONDS
    while len(rows) <= fewest or (len(rows) <= most and time.perf_counter() < until):
        orders, began = [], time.perf_counter()
        for rank, steps in enumerate(shape.local_steps):
            size = shape.batch_sizes[rank]
            draw = np.random.default_rng([rank, len(rows)])  # no sample is in the caches already
            orders.append(TrainOrder.to_measure(steps, size, num_samples, arrays, draw))
        seconds = [report.compute_seconds if report else 0.0 for report in do_round(orders)]
        if not all(seconds):
            break
        per_step = [s / steps for s, steps in zip(seconds, shape.local_steps, strict=True)]
        rows.append([*per_step, max(0.0, time.perf_counter() - began - max(seconds))])
    return rows[1:]
