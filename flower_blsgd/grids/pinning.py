"""Pin processes and threads to a worker's device, cores and number of compute threads."""

import contextlib
import logging
import os
from collections.abc import Iterator

from .worker_spec import WorkerSpec

_LOG = logging.getLogger(__name__)

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Read once, when the library is loaded."""

ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 28), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Read once, when a process starts.

By default, glibc returns memory to the kernel after every message, and the kernel clears it again:
copying a model of 1 MB took six times as long.
"""


def num_threads(worker: WorkerSpec, threads: int = 0) -> int:
    """Return the compute threads of a worker: `threads`, or one per core if `threads` is 0."""
    return threads or max(1, len(worker.cores))


def environment(worker: WorkerSpec, threads: int = 0) -> dict[str, str]:
    """Return the environment variables of a worker's process.

    A CPU worker sees no GPU, so it uses no GPU memory. An accelerator worker sees all GPUs, so
    ``cuda:1`` is the same card in every process.
    """
    count = str(num_threads(worker, threads))
    variables = dict.fromkeys(THREAD_VARIABLES, count)
    variables |= {name: os.environ.get(name, value) for name, value in ALLOCATOR.items()}
    if worker.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables


@contextlib.contextmanager
def pinned(worker: WorkerSpec, threads: int = 0) -> Iterator[None]:
    """Pin the calling thread to a worker's cores and set torch's threads, within a block.

    Both are restored afterwards, because one process may serve several workers in turn, as Ray's
    actors do. On systems without affinity (macOS), only the number of threads is set.
    """
    with on_cores_of(worker):
        import torch  # after pinning, since its threads inherit the cores

        threads_before = torch.get_num_threads()
        torch.set_num_threads(num_threads(worker, threads))
        try:
            yield
        finally:
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
    os.sched_setaffinity(0, worker.cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
