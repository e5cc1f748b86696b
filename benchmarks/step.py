"""LocalSGD against hand-written PyTorch loops: the same steps, the same data, the same threads.

Four take turns within one run: a loop that anybody would write, LocalSGD with the same settings,
the best loop that we can write (channels last), and LocalSGD
with those settings. A turn is one order; what LocalSGD does more (load the global model, keep every
sample's loss, copy the result) is part of its turn. A ratio of the speeds is taken for each pair of
turns, since a shared machine changes its mind. This command measures the CPU in float32;
``benchmarks.gpu`` measures a card.
"""

import gc
import math
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import RecordDict

from flower_blsgd import LocalSGD, TrainOrder
from flower_blsgd.devices.worker_spec import Precision
from flower_blsgd.worker.model_io import state_record
from flower_blsgd.worker.step import use_precision

from .bare_loops import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Turn, bare_loop
from .models import RESNET20, Data, Workload
from .rows import Measured, Row, conditions, main, not_run, row, with_goal

CPU_GOAL = 0.97
"""Of ResNet20 with batches of 32, as speed of LocalSGD over that of the bare loop."""


def measure(quick: bool) -> Measured:
    """Measure ResNet20 with one thread and with all."""
    cores = torch.get_num_threads()
    rows: list[Row] = []
    for threads in dict.fromkeys((1, cores)):
        torch.set_num_threads(threads)
        shape = 32, 4 if quick else 32
        rows += rows_of(RESNET20, torch.device("cpu"), shape, 3 if quick else 11)
    return rows, conditions(data="made up, on the device", precision="float32")


def rows_of(
    workload: Workload,
    device: torch.device,
    shape: tuple[int, int],
    turns: int,
    precision: Precision = "float32",
) -> list[Row]:
    """Return what all competitors reach with batches of a size, and steps per turn."""
    batch_size, steps = shape
    where = f"cpu, {_threads()}" if device.type == "cpu" else f"{device.type}, {precision}"
    name = f"{workload.name}, B {batch_size} ({where})"
    if workload.obstacle:
        return [not_run(name, workload.obstacle)]
    use_precision(precision, device)
    data = data_of(workload, shape)
    case = workload, data, device, batch_size, precision
    best = "best bare loop (channels last)"
    competitors = {
        "bare loop": bare_loop(*case),
        "LocalSGD": local_sgd(*case),
        best: bare_loop(*case, channels_last=True),
        "LocalSGD, channels last": local_sgd(*case, channels_last=True),
    }
    seconds = take_turns(competitors, len(data[1]), shape, turns)
    del competitors
    gc.collect()  # the next model may need the memory
    speeds = {who: [batch_size * steps / s for s in taken[1:]] for who, taken in seconds.items()}
    unit = f"{workload.item} per s"
    bare, ours, best, ours_best = speeds
    rows = [
        row(f"{name}: {bare}", speeds[bare], unit),
        paired(f"{name}: {ours}", unit, speeds[ours], speeds[bare], bare),
        paired(f"{name}: {best}", unit, speeds[best], speeds[bare], bare),
        paired(f"{name}: {ours_best}", unit, speeds[ours_best], speeds[best], best),
    ]
    if workload is RESNET20 and device.type == "cpu":
        rows[1] = with_goal(rows[1], at_least=CPU_GOAL, of="ratio")
    return rows


def data_of(workload: Workload, shape: tuple[int, int]) -> Data:
    """Return made-up samples for turns of a shape: batch size and steps."""
    torch.manual_seed(0)
    return workload.data(max(256, min(4096, math.prod(shape))))


def take_turns(
    competitors: Mapping[str, Turn], num_samples: int, shape: tuple[int, int], turns: int
) -> dict[str, list[float]]:
    """Return the seconds of each competitor's turns; the first of them warms up."""
    seconds: dict[str, list[float]] = {who: [] for who in competitors}
    for turn in range(turns + 1):
        names = list(competitors)
        for who in names if turn % 2 else reversed(names):
            draw = np.random.default_rng(turn)
            indices = draw.integers(0, num_samples, math.prod(shape), dtype=np.int32)
            began = time.perf_counter()
            competitors[who](indices)
            seconds[who].append(time.perf_counter() - began)
    return seconds


def paired(
    name: str, unit: str, values: Sequence[float], against: Sequence[float], against_name: str
) -> Row:
    """Return a row whose ratio is the median over pairs of turns, with its range."""
    made = row(name, values, unit)
    ratios = [ours / theirs for ours, theirs in zip(values, against, strict=True)]
    spread = {"ratio_minimum": min(ratios), "ratio_maximum": max(ratios)}
    return made | {"ratio": statistics.median(ratios), "against": against_name, **spread}


def local_sgd(
    workload: Workload,
    data: Data,
    device: torch.device,
    batch_size: int,
    precision: Precision,
    *,
    channels_last: bool = False,
    compiled: bool = False,
) -> Turn:
    """Return an order of LocalSGD, as a worker handles it."""
    model = workload.model()
    arrays = state_record(model)
    sgd = LocalSGD(
        model,
        data,
        device=device,
        optimizer=workload.optimizer,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        augment=workload.augment,
        precision=precision,
        channels_last=channels_last,
        compile=compiled,
    )
    state = RecordDict()

    def turn(indices: np.ndarray) -> None:
        order = TrainOrder(
            round=1,
            epoch=1,
            local_steps=len(indices) // batch_size,
            batch_size=batch_size,
            learning_rate=LEARNING_RATE,
            seed=0,
            deadline_seconds=0.0,
            momentum_policy="keep",
            indices=indices,
            arrays=arrays,
        )
        sgd.run(order, state)

    return turn


def _threads() -> str:
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' * (threads > 1)}"


if __name__ == "__main__":
    main(measure, __doc__)
