"""Synchronous training by PyTorch's own DistributedDataParallel, with a rank for each worker.

`epoch_seconds` starts the ranks, each a process pinned as our own workers are. A rank that is
slowed on purpose waits by the same rule as ours: when its gradients are computed, until the step
has taken `slowdown` times as long. Only then does it join the sum.

``python -m benchmarks.ddp SETTINGS``: one rank. It ends when its parent does.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from flower_blsgd.devices.pinning import environment, pinned
from flower_blsgd.devices.worker_spec import WorkerSpec, parse_workers

from .noop_rounds import ROOT, NotRunError

LONGEST_WAIT = timedelta(minutes=10)


@dataclass(frozen=True)
class Settings:
    """What all ranks do.

    Parameters
    ----------
    workers : str
        By the grammar of the workers; a rank for each.
    backend : {"gloo", "nccl"}
        That adds up the gradients.
    data, model : str
        As `images.some_images` takes them.
    epochs : int
        The first is left out.
    batch_size : int
        Of each rank.
    learning_rate, momentum, weight_decay : float
        Of SGD.
    rank : int
        Which of the workers this is.
    folder : str
        Where ranks meet, and results are written.
    """

    workers: str
    backend: str
    data: str
    model: str
    epochs: int
    batch_size: int = 32
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 1e-4
    rank: int = 0
    folder: str = ""


def why_not(backend: str, workers: Sequence[WorkerSpec]) -> str | None:
    """Return why a backend cannot serve these workers; None if it can."""
    devices = [worker.device for worker in workers]
    if backend == "nccl":
        if not all(device.startswith("cuda") for device in devices):
            return "NCCL needs a GPU for every rank"
        if len(set(devices)) < len(devices):
            return "NCCL refuses two ranks on one GPU"
    return None


def epoch_seconds(settings: Settings, longest_seconds: float = 600.0) -> list[float]:
    """Return the seconds of every epoch but the first.

    Raises
    ------
    NotRunError
        If a rank failed, or they took too long.
    """
    workers = parse_workers(settings.workers)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, worker in enumerate(workers):
            mine = {**asdict(settings), "rank": rank, "folder": folder}
            with (Path(folder) / f"{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.ddp", json.dumps(mine)],
                    cwd=ROOT,
                    env={**os.environ, **environment(worker), **_loopback()},
                    stdin=subprocess.PIPE,  # held open: its end tells the rank that we are gone
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        try:
            _wait(processes, longest_seconds, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.wait()
                assert process.stdin is not None
                process.stdin.close()
        seconds: list[float] = json.loads((Path(folder) / "seconds.json").read_text())
        return seconds


def _loopback() -> dict[str, str]:
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if os.name == "posix" else {}


def _wait(processes: Sequence["subprocess.Popen[bytes]"], seconds: float, folder: Path) -> None:
    """Wait until all have ended well; the first that fails ends the waiting."""
    ends_at = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > ends_at:
            raise NotRunError(f"took longer than {seconds:.0f} s")
        if any(process.returncode for process in processes):
            break
        time.sleep(0.2)
    for rank, process in enumerate(processes):
        if process.returncode:
            lines = (folder / f"{rank}.log").read_text().strip().splitlines() or ["no output"]
            raise NotRunError(f"rank {rank} failed: {lines[-1].replace(str(ROOT), '.')[-200:]}")


def run_rank(settings: Settings) -> None:
    """Train as one rank; rank 0 writes the seconds of its epochs."""
    worker = parse_workers(settings.workers)[settings.rank]
    with pinned(worker):
        seconds = _train(settings, worker)
    if settings.rank == 0:
        (Path(settings.folder) / "seconds.json").write_text(json.dumps(seconds[1:]))


def _train(settings: Settings, worker: WorkerSpec) -> list[float]:
    import torch
    from torch import distributed, nn
    from torch.distributed import GradBucket
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    from flower_blsgd.worker.timing import throttle

    from .images import some_images

    world = len(parse_workers(settings.workers))
    device = torch.device(worker.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        settings.backend,
        init_method=f"file://{settings.folder}/meeting",
        rank=settings.rank,
        world_size=world,
        timeout=LONGEST_WAIT,
    )
    task = some_images(settings.data, settings.model)
    images, labels = (torch.as_tensor(part).to(device) for part in task.train)
    net = task.initial_model(0).to(device).train()
    ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(net, device_ids=ids)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    loss = nn.CrossEntropyLoss()
    began = 0.0

    def slowed_sum(
        group: distributed.ProcessGroup | None, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            throttle(began, worker.slowdown)
        return allreduce_hook(group, bucket)

    if worker.slowdown > 1:
        model.register_comm_hook(None, slowed_sum)
    generator = torch.Generator(device).manual_seed(settings.rank)
    draw = torch.Generator().manual_seed(0)  # the same order of the samples on all ranks
    steps = len(labels) // (world * settings.batch_size)
    seconds = []
    for _ in range(settings.epochs):
        order = torch.randperm(len(labels), generator=draw)[settings.rank :: world].to(device)
        distributed.barrier()
        epoch_began = began = time.perf_counter()
        for batch in order[: steps * settings.batch_size].split(settings.batch_size):
            inputs = images[batch]
            if task.augment is not None:
                inputs = task.augment(inputs, generator)
            optimizer.zero_grad()
            loss(model(inputs), labels[batch]).backward()
            if worker.slowdown > 1 and device.type == "cuda":
                torch.cuda.synchronize(device)  # the sum, which waits for others, is not slowed
            began = time.perf_counter()  # but the update is
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        distributed.barrier()
        seconds.append(time.perf_counter() - epoch_began)
    distributed.destroy_process_group()
    return seconds


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock would be held at exit
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run_rank(Settings(**json.loads(sys.argv[1])))
