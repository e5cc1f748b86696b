"""A worker process from both ends: the server's handle, and the program that the process runs.

The program answers the messages of one node with the user's ClientApp. It ends when the control
pipe closes or the server's process ends, even if the server is killed during a message.
"""

import collections
import contextlib
import ctypes
import fcntl
import functools
import math
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from ...devices.worker_spec import WorkerSpec
from ...errors import UsageError
from ...flower.app_call import (
    PROCESS_ENDS,
    Handler,
    do_deferred_work,
    error_of,
    handler_of,
    main_program_of,
    takes_views,
)
from ...flower.internals import NOT_LOADED, load_app, release_records_at_once
from ...processes import INTERRUPTED, end_with
from .fork_server import PROCESSES, start_worker
from .shared_memory import BufferPool, Channel, Payload, pack

_LAST_WORDS_SECONDS = 2.0
PROGRAM_SECONDS = 10.0
"""Time for the threads, child processes and exit functions of a program that was cut short."""

_LAST_REPLY_SECONDS = 5.0
"""Time for a message to arrive after the program has raised: the reply says why."""

_RETURN_SECONDS = 0.2
"""Time for a program to return after it has let its last message be answered."""

_EXIT_CODE_SECONDS = 2.0
UNKNOWN_EXIT_CODE = 255
"""The code that multiprocessing reports after the fork server has ended."""

_POLL_MILLISECONDS = 500
_REPORTED_LINES = 20


@dataclass(frozen=True)
class Job:
    """Arguments of a worker process.

    0 threads stand for one per core of the worker. `environment` is added to that of the server's
    process. `client_app` is ``module:attribute`` of a module in `app_dir`. `setup` is a function to
    call before the app is loaded. With `shows_output`, what the process prints goes where this
    process prints.
    """

    worker: WorkerSpec
    threads: int
    environment: Mapping[str, str]
    context: Context
    client_app: str
    app_dir: Path
    setup: Payload | None = None
    shows_output: bool = False


# --- in the server's process ------------------------------------------------------------------


class WorkerProcess:
    """A started worker process; OSError if the system cannot start it.

    `on_line` is called from a thread with every line that the process prints. On Linux the process
    is watched through a file descriptor (pidfd). So its end is noticed even if its children live
    on, and the end of the fork server is not mistaken for it.
    """

    def __init__(self, job: Job, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self.killed = False  # by us
        self._closing = threading.RLock()  # garbage collection may call `close` in any thread
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_REPORTED_LINES)
        with contextlib.ExitStack() as on_failure:
            ours, theirs = map(on_failure.enter_context, multiprocessing.Pipe())
            output, output_end = map(on_failure.enter_context, multiprocessing.Pipe(duplex=False))
            has_setup = job.setup is not None
            arguments = (theirs, job.context, job.client_app, job.app_dir, has_setup)
            with theirs, output_end:
                output_of = None if job.shows_output else output_end
                self._process = start_worker(
                    job.worker, job.threads, job.environment, serve, arguments, output_of
                )
            on_failure.pop_all()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._code: int | None = None
        self._pidfd = -1
        """File descriptor, readable once the process has ended; -1 without one."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # an old kernel, or the process has ended
                self._pidfd = os.pidfd_open(self.pid)
                # Not at exit: grids that are closed then still need it.
                weakref.finalize(self, os.close, self._pidfd).atexit = False
        self._channel = Channel(ours)
        self._channel.views = False  # a strategy may write to what it reads
        self._events = select.poll()
        for source in (ours.fileno(), self._pidfd):
            if source >= 0:
                self._events.register(source, select.POLLIN)
        self._listener = threading.Thread(target=self._listen, args=(output,), daemon=True)
        self._listener.start()
        if job.setup is not None:
            self.send(job.setup)

    @property
    def ended(self) -> bool:
        """Whether it ended, was killed or closed its pipe; only valid between two messages."""
        if self.killed or self._events.poll(0):
            return True
        return self._pidfd < 0 and self.wait(0.0) is not None

    def send(self, payload: Payload) -> None:
        """Send a message. If the process is dead, `receive` fails."""
        with contextlib.suppress(OSError):  # `receive` notices a dead process
            self._channel.send(payload)

    def receive(self) -> Message:
        """Wait for the reply to the message that was sent, and return it.

        EOFError or OSError if the process has ended. After any other exception of unpickling, the
        process continues.
        """
        # A child of a dead process may keep its end of the pipe open.
        while not (events := self._events.poll(_POLL_MILLISECONDS)):
            if self.wait(0.0) is not None:
                raise EOFError
        if not any(source == self._channel.fileno() for source, _ in events):
            raise EOFError
        reply: Message = self._channel.receive()
        return reply

    def hang_up(self) -> None:
        """Let a program know that no message follows, after which the process ends by itself."""
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._channel.fileno())) as pipe,
        ):
            pipe.shutdown(socket.SHUT_WR)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the exit code, negative for a signal; None if it still runs after `seconds`."""
        if self._code is None and self._pidfd < 0:
            self._code = self._polled(seconds)
        elif self._code is None and wait([self._pidfd], seconds):
            # Its parent reports the exit code a moment later, unless the parent is gone.
            code = self._polled(_EXIT_CODE_SECONDS)
            self._code = UNKNOWN_EXIT_CODE if code is None else code
        return self._code

    def _polled(self, seconds: float | None) -> int | None:
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while (code := self._exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return code

    def _exit_code(self) -> int | None:
        with PROCESSES:
            code = self._process.exitcode
            if code is not None:
                self._process.join()  # multiprocessing drops its record of the process
            return code

    def kill(self) -> None:
        """Kill the process and its children; `receive` fails."""
        self.killed = True
        self._kill()

    def _kill(self) -> None:
        for kill in (os.killpg, os.kill):  # a process that has just been started has no group
            if self.wait(0.0) is None:
                with contextlib.suppress(OSError):
                    kill(self.pid, signal.SIGKILL)

    def end(self, seconds: float = _LAST_WORDS_SECONDS) -> str:
        """End the process, and return its last output lines and, as the last line, how it died.

        It has this time to end by itself.
        """
        self.wait(seconds)
        self.close()
        code = self.wait() or 0
        died = death(code)
        if code == -signal.SIGKILL and not self.killed:
            died += ", as when the kernel runs out of memory"
        last = "\n".join(self._last_lines)
        return f"its last lines were:\n{last}\n{died}" if last else died

    def close(self) -> None:
        """End the process, wait for it, and release its resources. Safe to repeat in any thread."""
        with self._closing:
            self._kill()
            self.wait()
            self._channel.close()
            self._listener.join(_LAST_WORDS_SECONDS)

    def _listen(self, output: Connection) -> None:
        with (
            output,
            open(output.fileno(), errors="replace", closefd=False) as lines,
            contextlib.suppress(ValueError),
        ):
            for line in lines:
                self._last_lines.append(line.rstrip())
                self._on_line(line.rstrip())


def death(code: int) -> str:
    """Return how a process with this exit code died."""
    if -code in set(signal.Signals):
        return f"died (signal {signal.Signals(-code).name})"
    return f"died (exit code {code})"


# --- in the worker's process ------------------------------------------------------------------


def serve(
    control: Connection, context: Context, client_app: str, app_dir: Path, has_setup: bool
) -> None:
    """Answer messages until the server closes the control pipe or ends; see `Job`."""
    _end_with_server()
    release_records_at_once()
    pool = BufferPool()
    channel = Channel(control, new_memory=pool.new_memory)
    program = None
    try:
        if has_setup:
            channel.receive().unpack(channel)()
        app = load_app(client_app, app_dir, ClientApp)
        channel.views = takes_views(app)
        handle = handler_of(app, context)
        program = main_program_of(app, context)
    except EOFError:
        return
    except Exception:
        handle = functools.partial(_refuse, traceback.format_exc())
    if program is None:
        if _answer(channel, handle, pool):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # destructors may fail if the accelerator does
        return

    def answer() -> None:
        try:
            told = _answer(channel, handle, pool)
        except BaseException:  # else no reply would ever be sent
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        if not told and not ended.wait(_RETURN_SECONDS):
            INTERRUPTED.set()
            os.killpg(0, signal.SIGINT)  # as Ctrl-C in a terminal

    ended = threading.Event()
    code = 0
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        program(context)
    except BaseException as error:  # also SystemExit of a script
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    ended.set()
    thread.join(_LAST_REPLY_SECONDS if code else None)
    # The end of an interpreter: threads, exit functions, files, child processes. A child of
    # multiprocessing would skip most of it.
    ctypes.pythonapi.Py_Exit(0 if INTERRUPTED.is_set() else code)


def _answer(channel: Channel, handle: Handler, pool: BufferPool) -> bool:
    """Answer messages until the server closes the pipe; True after a reply that ends this process.

    OSError if the pipe cannot be used here, as with too many open files.
    """
    while True:
        try:
            message: Message = channel.receive()
        except (EOFError, ConnectionError):
            return False
        reply = handle(message)
        payload = _packed(reply, message, pool)
        is_last = reply.has_error() and reply.error.code == PROCESS_ENDS
        del message, reply  # so that the server can reuse their memory
        try:
            channel.send(payload)
        except ConnectionError:  # the server has ended
            return False
        del payload
        if is_last:
            return True
        do_deferred_work()


def _refuse(reason: str, message: Message) -> Message:
    return Message(Error(NOT_LOADED, reason), reply_to=message)


def _packed(reply: Message, message: Message, pool: BufferPool) -> Payload:
    try:
        return pack(reply, pool)
    except Exception as error:  # a value that cannot be pickled, or memory is short
        failure = error_of(UsageError(f"the reply cannot be sent: {error}"))
        return pack(Message(failure, reply_to=message), pool)


def _end_with_server() -> None:
    """End this process and its children with the server's process, even while the app computes."""
    server = multiprocessing.parent_process()
    assert server is not None
    assert server.pid is not None
    if sys.platform == "linux":
        # A handler may hold the interpreter's lock for long, so that the thread below cannot run.
        # The kernel's signal about the pipe ends the process all the same.
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(server.sentinel, fcntl.F_SETOWN, -os.getpgrp())
        flags = fcntl.fcntl(server.sentinel, fcntl.F_GETFL)
        fcntl.fcntl(server.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    # A fork of the server, such as a DataLoader's, may hold the sentinel open.
    end_with([server.pid], lambda: os.killpg(0, signal.SIGKILL), [server.sentinel])
