"""LocalSGD against hand-written PyTorch loops: the same steps, the same data, the same threads.

Four take turns within one run: a loop that anybody would write, LocalSGD with the same settings,
the best loop that we can write (channels last; on CUDA fused and compiled), and LocalSGD
with those settings. A turn is one order; what LocalSGD does more (load the global model, keep every
sample's loss, copy the result) is part of its turn. A ratio of the speeds is taken for each pair of
turns, since a shared machine changes its mind. All in float32, on CUDA with torch's own TF32
flags, and once more in 16 bits.
"""

import gc
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from flwr.app import RecordDict

from flower_blsgd import LocalSGD, TrainOrder
from flower_blsgd.grids.worker_spec import PRECISIONS, Precision
from flower_blsgd.worker.model_io import state_record

from .bare_loops import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Turn, bare_loop
from .models import DISTILBERT, RESNET20, VIT_B_16, WRN_16_8, WRN_28_10, Data, Workload
from .rows import Measured, Row, conditions, main, not_run, row, with_goal

WORKLOADS = (RESNET20, WRN_16_8, WRN_28_10, VIT_B_16, DISTILBERT)

CPU_GOAL, GPU_GOAL = 0.97, 4.0
"""Of ResNet20 with batches of 32, as speed of LocalSGD over that of the bare loop."""


def measure(quick: bool) -> Measured:
    """Measure ResNet20 on the CPU, with one thread and with all, and all models on CUDA."""
    cores = torch.get_num_threads()
    rows: list[Row] = []
    cpu = torch.device("cpu")
    for threads in dict.fromkeys((1, cores)):
        torch.set_num_threads(threads)
        rows += rows_of(RESNET20, cpu, (32, 4 if quick else 32), 3 if quick else 11)
    for workload in WORKLOADS:
        for precision in [p for p in PRECISIONS if p not in ("ieee", "tf32")]:
            rows += cuda_rows(workload, precision, quick)
    return rows, conditions(data="made up, on the device", precision="float32 unless named")


def cuda_rows(workload: Workload, precision: Precision, quick: bool) -> list[Row]:
    """Return the rows on CUDA, or why there are none."""
    if not torch.cuda.is_available():
        return [not_run(f"{workload.name} (cuda, {precision})", "no CUDA device")]
    batch_size, steps = workload.cuda
    shape = batch_size, min(steps, 8) if quick else steps
    return rows_of(workload, torch.device("cuda"), shape, 3 if quick else 11, precision)


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
    torch.manual_seed(0)
    data = workload.data(max(256, min(4096, batch_size * steps)))
    competitors = competitors_of(workload, data, device, batch_size, precision)
    seconds: dict[str, list[float]] = {who: [] for who in competitors}
    for turn in range(turns + 1):  # the first warms up
        names = list(competitors)
        for who in names if turn % 2 else reversed(names):
            draw = np.random.default_rng(turn)
            indices = draw.integers(0, len(data[1]), batch_size * steps, dtype=np.int32)
            began = time.perf_counter()
            competitors[who](indices)
            seconds[who].append(time.perf_counter() - began)
    del competitors
    gc.collect()  # the next model may need the memory
    samples = batch_size * steps
    speeds = {who: [samples / s for s in taken[1:]] for who, taken in seconds.items()}
    unit = f"{workload.item} per s"
    bare, ours, best, ours_best = speeds
    rows = [
        row(f"{name}: {bare}", speeds[bare], unit),
        paired(f"{name}: {ours}", unit, speeds[ours], speeds[bare], bare),
        paired(f"{name}: {best}", unit, speeds[best], speeds[bare], bare),
        paired(f"{name}: {ours_best}", unit, speeds[ours_best], speeds[best], best),
    ]
    if workload is RESNET20 and precision == "float32":
        goal = CPU_GOAL if device.type == "cpu" else GPU_GOAL
        rows[1] = with_goal(rows[1], at_least=goal, of="ratio")
    return rows


def paired(
    name: str, unit: str, values: Sequence[float], against: Sequence[float], against_name: str
) -> Row:
    """Return a row whose ratio is the median over pairs of turns."""
    made = row(name, values, unit)
    ratios = [ours / theirs for ours, theirs in zip(values, against, strict=True)]
    return made | {"ratio": statistics.median(ratios), "against": against_name}


def competitors_of(
    workload: Workload, data: Data, device: torch.device, batch_size: int, precision: Precision
) -> dict[str, Turn]:
    """Return who takes turns: bare, ours, best bare, ours with its settings."""
    case = workload, data, device, batch_size, precision
    if device.type == "cpu":
        best, best_loop = "best bare loop (channels last)", bare_loop(*case, channels_last=True)
    else:
        best = "best bare loop (channels last, compiled)"
        best_loop = bare_loop(*case, channels_last=True, compiled=True)
    return {
        "bare loop": bare_loop(*case),
        "LocalSGD": local_sgd(*case, channels_last=False),
        best: best_loop,
        "LocalSGD, channels last": local_sgd(*case, channels_last=True),
    }


def local_sgd(
    workload: Workload,
    data: Data,
    device: torch.device,
    batch_size: int,
    precision: Precision,
    *,
    channels_last: bool,
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
        compile=device.type == "cuda",
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
