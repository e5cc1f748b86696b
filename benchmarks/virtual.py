r"""What it costs to simulate several workers on one device.

Eight fast workers, each with its own momentum, against one worker that does the same number of
steps: the workers' orders one after another; side by side, a thread and a stream each (on an
accelerator only); and as one batched model (``replicas = "batched"``). ResNet20 with batches of 32,
and the small CNN of the digits with batches of 16. All take turns within one run. Loading the
global model, the losses and the copies of the result are part of an order, so eight orders have
eight times as much of that as the one order of the worker that they are compared with.

Then 1,000 virtual workers whose processes compute nothing, all in one process: milliseconds per
worker and round of everything around the steps, strategy and local grid together.
"""

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from torch import nn

from flower_blsgd import LocalSGD, TrainOrder
from flower_blsgd.models.resnet import resnet20
from flower_blsgd.runtime.machine import usable_cores
from flower_blsgd.runtime.memory import format_bytes, free_bytes
from flower_blsgd.tasks import load_task
from flower_blsgd.tasks.augmentation import random_crop_and_flip
from flower_blsgd.worker.model_state import state_record
from flower_blsgd.worker.replica_sgd import ReplicaSGD

from .cells import Cell
from .noop_rounds import FOLDER, NotRunError, rounds_by
from .rows import Measured, Row, conditions, main, not_run, row, with_goal

WORKERS = 8
VIRTUAL_WORKERS, QUICK_VIRTUAL_WORKERS = 1_000, 100
PARAMETERS = 270_000
MODELS_PER_WORKER = 3  # its reply, the next one, and what is on its way
WARM_UP_ROUNDS = 2
GOAL_MILLISECONDS = 1.0
UNIT = "ms per step"

Turn = Callable[[int], None]
"""Does all steps of all workers; the number draws the samples."""


@dataclass(frozen=True)
class Setting:
    """What the workers train.

    Parameters
    ----------
    name : str
        In the rows.
    model : callable
        Makes one.
    data : pair of tensors
        All samples.
    batch_size : int
        B.
    settings : dict
        Of `LocalSGD`.
    steps : int
        Of each worker in a turn.
    device : str
        Where.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Any
    batch_size: int
    settings: dict[str, Any]
    steps: int
    device: str

    def order(self, turn: int, steps: int, arrays: Any) -> TrainOrder:
        """Return an order of so many steps."""
        draw = np.random.default_rng(turn)
        return TrainOrder(
            round=1,
            epoch=1,
            local_steps=steps,
            batch_size=self.batch_size,
            learning_rate=0.01,
            seed=turn,
            deadline_seconds=0.0,
            momentum_policy="keep",
            indices=draw.integers(0, len(self.data[0]), steps * self.batch_size, dtype=np.int32),
            arrays=arrays,
        )


def measure(quick: bool) -> Measured:
    """Measure the eight workers on each device, and the thousand."""
    turns = 2 if quick else 7
    rows: list[Row] = []
    for setting in settings_on("cpu", 1 if quick else 4, 4 if quick else 32):
        rows += rows_of(setting, turns)
    if torch.cuda.is_available():
        for setting in settings_on("cuda", 32, 32):
            rows += rows_of(setting, turns)
    else:
        rows += [
            not_run(f"{name}, cuda", "there is no CUDA device here", UNIT)
            for name in ("ResNet20", "digits CNN")
        ]
    rows.append(virtual_row(QUICK_VIRTUAL_WORKERS if quick else VIRTUAL_WORKERS, quick))
    return rows, conditions(workers=WORKERS, turns=turns, virtual_parameters=PARAMETERS)


def settings_on(device: str, resnet_steps: int, digits_steps: int) -> list[Setting]:
    """Return what is trained there."""
    images = torch.randint(0, 256, (4096, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, 10, (4096,))
    common = {"momentum": 0.9, "weight_decay": 1e-4}
    augmented = {**common, "augment": random_crop_and_flip}
    digits = load_task("digits")
    return [
        Setting("ResNet20", resnet20, (images, labels), 32, augmented, resnet_steps, device),
        Setting("digits CNN", digits.model, digits.train, 16, common, digits_steps, device),
    ]


def rows_of(setting: Setting, turns: int) -> list[Row]:
    """Return a row for each way; the competitors take turns."""
    where = f"{setting.name}, {setting.device}"
    ways: dict[str, Turn] = {
        "one worker, the same steps": one_after_another(setting, 1, WORKERS * setting.steps),
        f"{WORKERS} workers, one after another": one_after_another(setting, WORKERS, setting.steps),
        f"{WORKERS} workers, batched": batched(setting),
    }
    rows = []
    threads = f"{WORKERS} workers, threads"
    if setting.device != "cpu":
        ways[threads] = side_by_side(setting)
    else:
        reason = "on a CPU the workers of a process take turns; on an accelerator only"
        rows.append(not_run(f"{where}: {threads}", reason, UNIT))
    milliseconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):  # the first warms up
        order = list(ways) if turn % 2 else list(reversed(ways))
        for way in order:
            began = time.perf_counter()
            ways[way](turn)
            if turn:
                seconds = time.perf_counter() - began
                milliseconds[way].append(1e3 * seconds / (WORKERS * setting.steps))
    reference, *others = ways
    against = milliseconds[reference]
    measured = [row(f"{where}: {way}", milliseconds[way], UNIT, against, "one") for way in others]
    return [row(f"{where}: {reference}", against, UNIT), *measured, *rows]


def one_after_another(setting: Setting, workers: int, steps: int) -> Turn:
    """Return workers that take turns; on a CPU with one object, as in a process of the grid."""
    count = 1 if setting.device == "cpu" else workers
    members = [local_sgd(setting) for _ in range(count)]
    arrays = state_record(members[0].model)
    states = [RecordDict() for _ in range(workers)]

    def turn(number: int) -> None:
        for worker, state in enumerate(states):
            members[worker % count].run(setting.order(number + worker, steps, arrays), state)

    return turn


def side_by_side(setting: Setting) -> Turn:
    """Return workers with a thread and a stream each, as the grid's on an accelerator."""
    members = [local_sgd(setting) for _ in range(WORKERS)]
    arrays = state_record(members[0].model)
    states = [RecordDict() for _ in members]
    lanes = [
        ThreadPoolExecutor(1, initializer=functools.partial(use_own_stream, setting.device))
        for _ in members
    ]

    def turn(number: int) -> None:
        orders = [setting.order(number + w, setting.steps, arrays) for w in range(WORKERS)]
        waiting = [
            lane.submit(member.run, order, state)
            for lane, member, order, state in zip(lanes, members, orders, states, strict=True)
        ]
        for each in waiting:
            each.result()

    return turn


def use_own_stream(device: str) -> None:
    """Let the calling thread compute beside others."""
    torch.cuda.set_stream(torch.cuda.Stream(device))


def batched(setting: Setting) -> Turn:
    """Return workers that are computed as one model."""
    model = setting.model()
    arrays = state_record(model)
    replicas = ReplicaSGD(model, setting.data, device=setting.device, **setting.settings)
    states = [RecordDict() for _ in range(WORKERS)]

    def turn(number: int) -> None:
        orders = [setting.order(number + w, setting.steps, arrays) for w in range(WORKERS)]
        replicas.run(list(zip(orders, states, strict=True)))

    return turn


def local_sgd(setting: Setting) -> LocalSGD:
    """Return a worker."""
    return LocalSGD(setting.model(), setting.data, device=setting.device, **setting.settings)


def virtual_row(workers: int, quick: bool) -> Row:
    """Return what a round of the local grid costs per worker, all of them in one process."""
    name = f"{workers:,} virtual workers, {PARAMETERS / 1e6:g} M, strategy and local grid"
    unit = "ms per worker and round"
    cell = Cell(workers, PARAMETERS)
    needed, free = MODELS_PER_WORKER * cell.round_bytes, free_bytes()
    if free is not None and needed > free:
        reason = f"needs about {format_bytes(needed)}, free are {format_bytes(free)}"
        return with_goal(not_run(name, reason, unit), at_most=GOAL_MILLISECONDS)
    try:
        seconds = virtual_rounds(cell, 6 if quick else 12)
    except NotRunError as error:
        return with_goal(not_run(name, str(error), unit), at_most=GOAL_MILLISECONDS)
    measured = row(name, [1e3 * s / workers for s in seconds], unit)
    return with_goal(measured, at_most=GOAL_MILLISECONDS)


def virtual_rounds(cell: Cell, rounds: int) -> Sequence[float]:
    """Return the seconds of each round but the first ones; four rounds are an epoch.

    Raises
    ------
    NotRunError
        If the run failed or took too long.
    """
    steps, batch_size = 8, 32
    app, core = str(FOLDER / "noop_biased_app"), usable_cores()[0]
    team = f"{cell.workers - 1}x cpu:{core} fast; 1x cpu:{core} slow"
    command = ["-m", "flower_blsgd", "run", app, "--workers", team]
    values = {
        "samples": 4 * cell.workers * steps * batch_size,
        "batch-size": batch_size,
        "local-steps": steps,
        "processes-per-device": 1,
    }
    return rounds_by(command, cell, rounds, WARM_UP_ROUNDS, 180, values)["round"]


if __name__ == "__main__":
    main(measure, __doc__)
