"""Start worker processes by forking one process that has imported torch and Flower already.

The imports take seconds, and on few cores ten workers would do them one after another. The
template process computes nothing, starts no thread and touches no device; each worker is a fork of
it, sets its own environment, cores and threads, and goes on as if it had been started anew.
`start_worker` falls back to that where forks are not safe: on systems other than Linux, and if an
import has started a thread or CUDA.

``python -m flower_blsgd.runtime.template_process CONTROL_FD SERVER_PID`` is the template's program.
"""

import contextlib
import gc
import importlib
import logging
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from .devices import WorkerSpec
from .pinning import ALLOCATOR, THREAD_VARIABLES, on_cores_of

_LOG = logging.getLogger(__name__)

_MODULES = ("numpy", "torch", "flwr.clientapp", "torch._dynamo", f"{__package__}.worker_process")
"""What every worker imports; torch's optimizers import ``torch._dynamo`` when they are made."""

_START_SECONDS = 120.0
_PARENT_CHECK_SECONDS = 1.0


@dataclass(frozen=True)
class WorkerStart:
    """What a worker process is before it runs any code of its own.

    Parameters
    ----------
    worker : WorkerSpec
        Its device and cores.
    threads : int
        Compute threads, >= 1.
    environment : mapping of str to str
        All of its environment variables.
    """

    worker: WorkerSpec
    threads: int
    environment: Mapping[str, str]


def start_worker(
    start: WorkerStart, control: int, lifeline: int, output: int
) -> "subprocess.Popen[bytes] | ForkedProcess":
    """Start a worker process; its program is `worker_process`.

    Parameters
    ----------
    start : WorkerStart
        Its environment, cores and threads.
    control : int
        File descriptor of its end of a socket pair.
    lifeline : int
        Of the reading end of a pipe whose writing end only this process holds.
    output : int
        Of where it prints.

    Raises
    ------
    OSError
        If the system cannot start it.
    """
    template = _running_template()
    if template is not None:
        try:
            return template.fork(start, (control, lifeline, output))
        except OSError as error:
            _LOG.info("a worker starts anew, not from the template process: %s", error)
    # -P: a module in the current folder must not take the place of a library's.
    command = [sys.executable, "-P", "-m", f"{__package__}.worker_process"]
    with on_cores_of(start.worker):  # pinned before it exists, so that no library's thread escapes
        return subprocess.Popen(
            [*command, str(control), str(lifeline), str(os.getpid())],
            env=dict(start.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(control, lifeline),
        )


def prepare_template(modules: Iterable[str] = ()) -> None:
    """Start the template process unless it runs, and have it import these modules as well.

    Returns at once. A module that cannot be imported is left to the workers.

    Parameters
    ----------
    modules : iterable of str
        What every worker will import; one that starts a thread or CUDA ends the forking.
    """
    template = _running_template()
    if template is not None:
        with contextlib.suppress(OSError):
            template.load(modules)


class _Template:
    """The server's side of a template process; safe between threads."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", f"{__package__}.template_process"]
        # Without threads of BLAS and OpenMP; glibc and OpenMP read their settings only once.
        quiet = dict.fromkeys(THREAD_VARIABLES, "1")
        quiet["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for a GPU does not initialise CUDA
        with ours, theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                env={**ALLOCATOR, **os.environ, **quiet},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
            self._connection = Connection(ours.detach())
        self.server = os.getpid()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._started: dict[int, int | str] = {}
        self._codes: dict[int, int] = {}
        self._number = 0
        self.lost = False
        """Whether the process is gone."""
        threading.Thread(target=self._listen, daemon=True).start()
        # Finalizers run in reverse at the end of the program: those of grids, made later, before.
        self.close = weakref.finalize(self, _close_template, self._connection, self._process)

    def load(self, modules: Iterable[str]) -> None:
        """Have it import these modules."""
        with self._sending:
            self._connection.send(("load", tuple(modules)))

    def fork(self, start: WorkerStart, fds: Sequence[int]) -> "ForkedProcess":
        """Return a new worker process.

        Raises
        ------
        OSError
            If there is none.
        """
        with self._sending:
            self._number += 1
            number = self._number
            self._connection.send(("fork", number, start, os.getcwd()))
            for fd in fds:
                send_handle(self._connection, fd, None)
        with self._changed:
            self._changed.wait_for(lambda: number in self._started or self.lost, _START_SECONDS)
            pid = self._started.pop(number, "the template process is gone")
        if isinstance(pid, str):
            raise OSError(pid)
        return ForkedProcess(self, number, pid)

    def signal(self, number: int, signal_number: int) -> None:
        # Sent there, where it is known whether the process id is still the worker's.
        with contextlib.suppress(OSError), self._sending:
            self._connection.send(("signal", number, signal_number))

    def code(self, number: int, timeout: float | None) -> int | None:
        """Wait for a worker's exit code, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._codes or self.lost, timeout)
            return self._codes.get(number)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                what, number, value = self._connection.recv()
                with self._changed:
                    (self._started if what == "started" else self._codes)[number] = value
                    self._changed.notify_all()
        with self._changed:
            self.lost = True
            self._changed.notify_all()


class ForkedProcess:
    """A fork of the template process, with the methods of `subprocess.Popen` that are needed."""

    def __init__(self, template: _Template, number: int, pid: int) -> None:
        self._template, self._number, self.pid = template, number, pid

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self._code(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code.

        Raises
        ------
        subprocess.TimeoutExpired
            If it still runs after `timeout` seconds.
        """
        code = self._code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("worker process", timeout or 0.0)
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        self._template.signal(self._number, signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._template.signal(self._number, signal.SIGKILL)

    def _code(self, timeout: float | None) -> int | None:
        code = self._template.code(self._number, timeout)
        if code is None and self._template.lost:  # nobody will say, and it ends by itself soon
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            return -signal.SIGKILL
        return code


_templates: list[_Template] = []
"""This process's template, if it has one."""
_starting = threading.Lock()


def _running_template() -> _Template | None:
    """Return this process's template, started anew if it is gone; None if there can be none."""
    if sys.platform != "linux":
        return None
    with _starting:
        if not _templates or _templates[0].lost or _templates[0].server != os.getpid():
            try:
                _templates[:] = [_Template()]
            except OSError as error:
                _LOG.info("no template process: %s", error)
                return None
        return _templates[0]


def _close_template(connection: Connection, process: "subprocess.Popen[bytes]") -> None:
    process.kill()  # it may be importing something, and it holds nothing
    process.wait()
    # Shut down as well: our own thread is reading, and closing alone would not wake it.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


# --- the template's own program ---------------------------------------------------------------


def main() -> None:
    """Fork a worker for every request until the server is gone; in a fork, be that worker."""
    control_fd, server = (int(argument) for argument in sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too; the server decides
    worker = _Forks(Connection(control_fd), server).serve()
    if worker is not None:
        from .worker_process import serve

        # Only here, with nothing of the template on the stack: an exception, `sys.exit` and what
        # is to be done at exit go the same ways as in a process that was started anew.
        serve(*worker)


_Worker = tuple[int, int, int]
"""What `worker_process.serve` takes."""


class _Forks:
    """The template's forks, and its connection to the server, whose process id is `server`."""

    def __init__(self, control: Connection, server: int) -> None:
        self._control, self._server = control, server
        self._numbers: dict[int, int] = {}
        """The server's number of each living fork, by process id."""
        self._wake, self._wakes = os.pipe()
        for fd in (self._wake, self._wakes):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes)  # so that `select` returns when a fork has ended

    def serve(self) -> _Worker | None:
        """Serve requests until the server is gone; in each fork, return what it is to serve."""
        _load(_MODULES)
        control = self._control.fileno()
        with contextlib.suppress(EOFError, OSError):
            while os.getppid() == self._server:
                wait = select.select([control, self._wake], [], [], _PARENT_CHECK_SECONDS)
                if self._wake in wait[0]:
                    os.read(self._wake, 4096)
                    self._report_ended()
                if control in wait[0]:
                    worker = self._answer(*self._control.recv())
                    if worker is not None:
                        return worker
        return None

    def _answer(self, request: str, *details: Any) -> _Worker | None:
        if request == "load":
            _load(*details)
        elif request == "signal":
            number, signal_number = details
            # A fork that has ended is waited for here only: the process id is still its own.
            for pid in [pid for pid, known in self._numbers.items() if known == number]:
                os.kill(pid, signal_number)
        else:
            number, start, folder = details
            fds = [recv_handle(self._control) for _ in range(3)]
            started: int | str = unsafe_to_fork(Path("/proc/self"))
            if not started:
                try:
                    started = os.fork()
                except OSError as error:
                    started = str(error)
            if started == 0:
                self._close()
                _become_worker(start, folder, fds[2])
                return fds[0], fds[1], os.getppid()
            for fd in fds:
                os.close(fd)
            if isinstance(started, int):
                self._numbers[started] = number
            self._control.send(("started", number, started))
        return None

    def _report_ended(self) -> None:
        for pid in list(self._numbers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                self._control.send(("ended", self._numbers.pop(pid), code))

    def _close(self) -> None:
        """Give up in a fork what is the template's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        os.close(self._wake)
        os.close(self._wakes)


def _load(modules: Iterable[str]) -> None:
    for module in modules:
        with contextlib.suppress(Exception):  # the app that needs it says so better
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a fork's collector then leaves the pages that all of them share alone


def unsafe_to_fork(process: Path) -> str:
    """Return why a process must not be forked, as its folder in ``/proc`` shows; empty if it may.

    A fork has none of the other threads, and CUDA does not work in it if it was initialised before.
    """
    threads = len(os.listdir(process / "task")) - 1
    if threads:
        return f"an import has started {threads} threads"
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            if os.readlink(fd).startswith("/dev/nvidia-uvm"):
                return "an import has initialised CUDA"
    return ""


def _become_worker(start: WorkerStart, folder: str, output: int) -> None:
    """Make a fork what a process is that was started anew."""
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("blsgd-worker")
        os.chdir(folder)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.argv[1:] = []
    if start.worker.cores:
        os.sched_setaffinity(0, start.worker.cores)
    random.seed()
    import numpy as np
    import torch

    np.random.seed()  # the generator that the whole process shares
    torch.set_num_threads(start.threads)
    if start.threads > 1:
        with contextlib.suppress(ImportError):  # numpy's BLAS was loaded with one thread
            threadpool_limits = importlib.import_module("threadpoolctl").threadpool_limits
            threadpool_limits(start.threads)


if __name__ == "__main__":
    main()
