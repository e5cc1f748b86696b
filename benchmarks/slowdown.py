"""Whether a worker with ``slowdown=4`` takes four times as long as one that is not slowed.

``python -m benchmarks.slowdown``: two LocalSGD on one core, on the digits and on images of
CIFAR-10's shape (ResNet8), get the same orders in turn: of one step, of 32 steps, and of one step
whose batch size changes as with ``dlb``. The factor is the median of the ratios of
`compute_seconds`, for each batch size. The last row of each task compares orders of one step of the
slowed one, one after another, with those of one that is not slowed.
"""

import itertools
import os
import statistics
from collections.abc import Sequence

import numpy as np
import torch

from flower_blsgd import LocalSGD, Task, TrainOrder
from flower_blsgd.devices.machine import this_machine
from flower_blsgd.tasks import load_task
from flower_blsgd.worker.model_io import state_record
from flower_blsgd.worker.timing import seconds_per_step

from .images import data_text, some_images
from .rows import Measured, Row, conditions, main, row

SLOWDOWN, TOLERANCE = 4.0, 0.03
IMAGES = 512


def measure(quick: bool) -> Measured:
    """Measure on the last core, with one thread."""
    os.sched_setaffinity(0, this_machine().cores[-1:])
    torch.set_num_threads(1)
    digits = load_task("digits", "", "")
    images = some_images(data_text(IMAGES, None), "resnet8")
    rows = rows_of("digits", digits, 16, 20 if quick else 200)
    rows += rows_of("ResNet8", images, 32, 5 if quick else 40)
    return rows, conditions(slowdown=SLOWDOWN)


def rows_of(name: str, task: Task, size: int, turns: int) -> list[Row]:
    """Return the factors with batches of a size and of others, so many turns of each."""
    plain, slowed = (
        LocalSGD(task.initial_model(0), task.train, augment=task.augment, slowdown=factor)
        for factor in (1.0, SLOWDOWN)
    )
    sizes = (size // 2, size, size * 3 // 2, size * 2)
    draw = np.random.default_rng(0)
    arrays = state_record(plain.model)

    def seconds(sgd: LocalSGD, steps: int, batch_size: int) -> float:
        order = TrainOrder.to_measure(steps, batch_size, IMAGES, arrays, draw)
        return sgd.run(order).compute_seconds

    def in_turn(steps: int, batch_size: int) -> float:
        own = seconds(plain, steps, batch_size)
        return seconds(slowed, steps, batch_size) / own

    for batch_size, sgd in itertools.product(sizes, (plain, slowed)):
        seconds(sgd, 2, batch_size)  # what comes but once for a size
    one = [in_turn(1, size) for _ in range(turns)]
    many = [in_turn(32, size) for _ in range(max(3, turns // 5))]
    changing = [[in_turn(1, other) for other in sizes] for _ in range(turns)]
    own = [seconds_per_step(slowed, size) / seconds_per_step(plain, size) for _ in range(3)]
    unrested = [seconds(plain, 1, size) for _ in range(turns)]
    rested = [seconds(slowed, 1, size) / statistics.median(unrested) for _ in range(turns)]
    return [
        factor(f"{name}: 1 step", one),
        factor(f"{name}: 32 steps", many),
        *(
            factor(f"{name}: 1 step, changing batches, {other}", ratios)
            for other, ratios in zip(sizes, zip(*changing, strict=True), strict=True)
        ),
        row(f"{name}: its own measurement", own, "x"),
        row(f"{name}: 1 step, against no rest", rested, "x"),
    ]


def factor(name: str, ratios: Sequence[float]) -> Row:
    """Return the row of a factor, with its goal."""
    least, most = SLOWDOWN * (1 - TOLERANCE), SLOWDOWN * (1 + TOLERANCE)
    made = row(name, ratios, "x")
    return made | {"goal": f"{least:.2f} to {most:.2f}", "goal_met": least <= made["value"] <= most}


if __name__ == "__main__":
    main(measure, __doc__)
