"""Start worker processes, on Linux as forks of one process that has imported torch and Flower.

These imports take seconds, and on few cores ten workers would run them one after another. On Linux,
workers are therefore forked from multiprocessing's fork server, which has imported both. The fork
server computes nothing, has no BLAS threads and initialises no device. On other systems, and where
forking fails, each worker process is spawned. One of another interpreter is started as a program.
"""

import contextlib
import gc
import importlib
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from ...devices.pinning import (
    ALLOCATOR,
    COMPILE_THREADS,
    PASSIVE,
    THREAD_VARIABLES,
    num_threads,
    pinned,
)
from ...devices.worker_spec import OWN_PYTHON, WorkerSpec
from ...errors import UsageError
from ...files import outlast_readers
from ...processes import SERVERS_OWN, leave_signals_to_server
from .elsewhere import OtherProcess

_LOG = logging.getLogger(__name__)

_PRELOAD = ("flwr.clientapp", "torch._dynamo", f"{__package__}.worker_process")
"""Imports that all workers share. torch's optimizers import ``torch._dynamo`` on creation."""

PROCESSES = threading.RLock()
"""Held while a process is started or its exit code is read: multiprocessing has no lock."""


def start_fork_server(modules: Iterable[str] = ()) -> None:
    """Start the fork server unless it runs, without waiting for its imports.

    It ends with this program. In addition to torch and Flower it imports `modules`, which must not
    start threads or initialise CUDA. Modules that cannot be imported are left to the workers.
    """
    if sys.platform != "linux":
        return
    with PROCESSES, _one_thread_variables(), contextlib.suppress(OSError):
        if not _preloaded:
            Finalize(None, _end_fork_server, exitpriority=-1)  # after the grids' own
        _preloaded.update(dict.fromkeys([*_PRELOAD, *modules]))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        try:
            resource_tracker.ensure_running()  # this unblocks signals when it returns
            signal.pthread_sigmask(signal.SIG_BLOCK, SERVERS_OWN)
            multiprocessing.set_forkserver_preload(list(_preloaded))
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Devices of Linux's drivers for accelerators: NVIDIA's, AMD's and that of WSL2."""

_preloaded: dict[str, None] = {}
"""Modules that the fork server imports; an ordered set."""


def _end_fork_server() -> None:
    """Kill the fork server: it may be importing, and holds the output streams of this program."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def start_worker(
    worker: WorkerSpec,
    threads: int,
    environment: Mapping[str, str],
    program: Callable[..., None],
    arguments: tuple[object, ...],
    output: Connection | None,
) -> BaseProcess | OtherProcess:
    """Start a process that is pinned to a worker's device, cores and threads (0: one per core).

    Its `environment` is added to that of this process. It calls `program`, a function of a module.
    `output` is a pipe for stdout and stderr, or None for those of this process. The caller closes
    its own copies of this and other pipes. OSError if the system cannot start the process.
    """

    def start(method: str) -> BaseProcess:
        process: BaseProcess = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
            target=_run_worker,
            args=(worker, threads, variables, program, arguments, output),
            daemon=True,
        )
        main = sys.modules["__main__"]
        here = multiprocessing.current_process()
        spec = main.__spec__
        daemon = here.daemon
        chosen = multiprocessing.get_start_method(allow_none=True)
        # A child of multiprocessing runs its parent's script again, unless it has this name.
        main.__spec__ = ModuleSpec("__main__", None)
        here.daemon = False  # a daemon, such as a process of a Pool, may have no children
        try:
            process.start()
        finally:
            main.__spec__ = spec
            here.daemon = daemon
            if chosen is None:  # starting has set a method; the program may want another one
                multiprocessing.set_start_method(None, force=True)
        return process

    with PROCESSES:  # no other thread changes the environment meanwhile
        variables = {**os.environ, **environment}
    if worker.python:
        variables[OWN_PYTHON] = worker.python
        work = (_run_worker, worker, threads, variables, program, arguments)
        return OtherProcess(worker.python, variables, work, output)
    start_fork_server()  # in case the first one has ended
    with PROCESSES:
        if sys.platform == "linux":
            try:
                return start("forkserver")
            except (OSError, EOFError) as error:
                _LOG.info("a worker is spawned, not forked: %s", error)
        with _one_thread_variables():
            return start("spawn")


@contextlib.contextmanager
def _one_thread_variables() -> Iterator[None]:
    """Set environment variables while the fork server or a spawned worker is started.

    They set one compute thread per library, the memory allocator and safe imports, and prevent CUDA
    initialisation. A worker's process sets its own number of threads later, but OpenMP's policy is
    read once, possibly before the workers are known: the driver decides.
    """
    has_driver = any(map(os.path.exists, _DRIVERS))
    variables = {
        **ALLOCATOR,
        **(PASSIVE if has_driver else {}),
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, "1"),
        "PYTHONSAFEPATH": "1",  # modules in the current folder must not shadow a library's
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a search for GPUs does not initialise CUDA
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_worker(
    worker: WorkerSpec,
    threads: int,
    variables: Mapping[str, str],
    program: Callable[..., None],
    arguments: tuple[object, ...],
    output: Connection | None,
) -> None:
    """Run a program in its process, with the state of a freshly started process."""
    # Ctrl-C and the end of a terminal reach this process's children through the server only.
    os.setpgid(0, 0)
    # Else the terminal stops such a group when it reads, and with `stty tostop` when it prints.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTIN, signal.SIGTTOU])
    leave_signals_to_server()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SERVERS_OWN)
    if output is not None:
        with output:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
    outlast_readers()
    for text in (sys.stdout, sys.stderr):
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(line_buffering=True)  # so the last lines of a killed process arrive
    with contextlib.suppress(OSError):  # the name in `top`
        Path("/proc/self/comm").write_text("blsgd-worker")
    os.environ.clear()
    os.environ.update(variables)
    del sys.argv[1:]
    multiprocessing.current_process().daemon = False  # it may start child processes
    multiprocessing.set_start_method(None, force=True)
    gc.freeze()  # keep the collector from touching the pages that all forks share
    with contextlib.ExitStack() as pins:
        try:
            pins.enter_context(pinned(worker, threads))
        except UsageError:  # which the app's own calls report
            pins.enter_context(pinned(replace(worker, device="cpu"), threads))
        import numpy as np
        import torch

        np.random.seed()  # the global generators are the same in all forks
        torch.default_generator.seed()
        if (count := num_threads(worker, threads)) > 1:  # numpy's BLAS was loaded with one thread
            importlib.import_module("threadpoolctl").threadpool_limits(count)
        inductor: Any = sys.modules.get("torch._inductor.config")
        if inductor is not None:  # imported before the fork
            inductor.compile_threads = int(variables[COMPILE_THREADS])
        program(*arguments)
