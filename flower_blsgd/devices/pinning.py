"""Pin processes and threads to a worker's device, cores and number of compute threads."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence

from ..errors import UsageError, first_line
from .machine import this_machine, visible_card
from .worker_spec import WorkerSpec

_LOG = logging.getLogger(__name__)

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Read once, when the library is loaded."""

ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 28), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Read once, when a process starts.

By default, glibc returns memory to the kernel after every message, and the kernel clears it again:
copying a model of 1 MB took six times as long.
"""

COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Processes in which torch.compile compiles: by default one per core, for each worker."""

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads of a CPU worker that wait leave the core to others, such as one that feeds a GPU."""


def num_threads(worker: WorkerSpec, threads: int = 0) -> int:
    """Return the compute threads of a worker: `threads`, or one per core if `threads` is 0."""
    return threads or max(1, len(worker.cores))


def environment(
    worker: WorkerSpec, threads: int = 0, workers: Sequence[WorkerSpec] = (), alone: bool = False
) -> dict[str, str]:
    """Return the environment variables of a worker's process, next to others on this machine.

    A CPU worker sees no GPU, so it uses no GPU memory. An accelerator worker sees all GPUs, so
    ``cuda:1`` is the same card in every process. With `alone`, and if the GPUs are MIG devices, it
    sees only its own one, as ``cuda:0``.
    """
    count = str(num_threads(worker, threads))
    defaults = dict(ALLOCATOR)
    if workers:
        defaults[COMPILE_THREADS] = str(max(1, len(this_machine().cores) // len(workers)))
    if worker.device == "cpu" and any(other.device != "cpu" for other in workers):
        defaults |= PASSIVE
    variables = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return variables | dict.fromkeys(THREAD_VARIABLES, count) | visible_card(worker.device, alone)


@contextlib.contextmanager
def pinned(worker: WorkerSpec, threads: int = 0) -> Iterator[None]:
    """Pin the calling thread to a worker's device and cores, and set torch's threads, in a block.

    Provisional: may change in any minor version.

    ``device="cuda"`` is then the worker's card. All are restored afterwards, because one process
    may serve several workers in turn, as Ray's actors do. On systems without affinity (macOS), the
    cores are not set. UsageError if the device refuses.
    """
    with on_cores_of(worker):
        import torch  # after pinning, since its threads inherit the cores

        threads_before = torch.get_num_threads()
        torch.set_num_threads(num_threads(worker, threads))
        index = None
        if worker.device != "cpu":
            device = torch.device(worker.torch_device)
            there = torch.accelerator.current_accelerator(check_available=True)
            index = device.index if there is not None and there.type == device.type else None
        try:
            with contextlib.ExitStack() as device_index:
                try:
                    device_index.enter_context(torch.accelerator.device_index(index))
                except RuntimeError as error:  # no memory for a context, or another process owns it
                    raise UsageError(
                        f"{worker.device} cannot be used: {first_line(error)}"
                    ) from None
                yield
        finally:
            if torch.get_num_threads() != threads_before:  # setting it takes longer
                torch.set_num_threads(threads_before)


@contextlib.contextmanager
def on_cores_of(worker: WorkerSpec) -> Iterator[None]:
    """Pin the calling thread, and everything that it starts meanwhile, to a worker's cores."""
    if not worker.cores:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        _LOG.warning("no CPU affinity on this system: %s is not pinned", worker.device)
        yield
        return
    before = os.sched_getaffinity(0)
    if before != set(worker.cores):  # setting them takes longer
        os.sched_setaffinity(0, worker.cores)
    try:
        yield
    finally:
        if os.sched_getaffinity(0) != before:
            os.sched_setaffinity(0, before)
