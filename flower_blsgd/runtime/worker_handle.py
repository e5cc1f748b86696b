"""The parent's side of one worker process: start it, talk to it, notice its death."""

import collections
import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import IO

from flwr.app import Error, Message

from .flower_internals import CRASHED, NODE_GONE
from .pinning import environment
from .worker_process import Job

_LOG = logging.getLogger(__name__)

_MAX_DEATHS = 3
_CLOSE_SECONDS = 5.0
_TOLD_LINES = 20


class WorkerHandle:
    """One worker process, and the thread that serves it.

    Parameters
    ----------
    job : Job
        Sent to the process when it starts.
    threads : int
        Compute threads; 0 for one per core.
    on_reply : callable
        Called from the handle's thread with every reply, error replies included.
    """

    def __init__(self, job: Job, threads: int, on_reply: Callable[[Message], None]) -> None:
        self._job = job
        self._environment = {**os.environ, **environment(job.worker, threads)}
        self._on_reply = on_reply
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._control: Connection | None = None
        self._lifeline: int | None = None
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_TOLD_LINES)
        self._deaths = 0
        self._closing = False
        self.given_up = False

    @property
    def label(self) -> str:
        """How logs call it."""
        worker = self._job.worker
        return worker.name or f"{worker.device_with_cores} (node {self._job.context.node_id})"

    @property
    def process_id(self) -> int | None:
        """The process, if it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def submit(self, message: Message) -> None:
        """Queue a message; the process starts with the first one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()
        self._inbox.put(message)

    def begin_close(self) -> None:
        """Ask the process to end."""
        self._closing = True
        self._inbox.put(None)
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()

    def finish_close(self) -> None:
        """Wait until the process is gone; kill it if it does not go."""
        process = self._process
        if process is not None:
            try:
                process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        self._release()

    def _serve(self) -> None:
        self._start()
        while (message := self._inbox.get()) is not None:
            if self.given_up:
                reason = f"worker {self.label} died {_MAX_DEATHS} times and is given up"
                self._on_reply(Message(Error(NODE_GONE, reason), reply_to=message))
                continue
            try:
                self._revive()
                assert self._control is not None
                self._control.send(message)
                reply = self._control.recv()
            except (EOFError, OSError):
                if self._closing:
                    return
                self._on_reply(Message(Error(CRASHED, self._obituary()), reply_to=message))
                self._start_again()
            else:
                self._deaths = 0
                self._on_reply(reply)

    def _revive(self) -> None:
        """Replace a process that died between two messages; no message has failed yet."""
        if self._process is not None and self._process.poll() is not None and not self._closing:
            _LOG.warning("%s", self._obituary())
            self._start_again()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline_end, lifeline = os.pipe()
        command = [sys.executable, "-m", "flower_blsgd.runtime.worker_process"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(lifeline_end)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=(theirs.fileno(), lifeline_end),
            )
        os.close(lifeline_end)
        self._lifeline = lifeline
        self._control = Connection(ours.detach())
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
        if self._closing:  # `begin_close` may have come before there was a process to end
            self._process.terminate()
        with contextlib.suppress(OSError):  # a process that dies at once is told by the next recv
            self._control.send(self._job)

    def _start_again(self) -> None:
        self._release()
        self._deaths += 1
        if self._deaths >= _MAX_DEATHS:
            self.given_up = True
            _LOG.error("worker %s died %d times in a row: given up", self.label, _MAX_DEATHS)
        else:
            _LOG.warning("worker %s starts again", self.label)
            self._start()

    def _release(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def _listen(self, output: IO[str]) -> None:
        """Pass on what the process prints: to the log, and to its obituary."""
        with output:
            for line in output:
                self._last_lines.append(line.rstrip())
                _LOG.info("[%s] %s", self.label, line.rstrip())

    def _obituary(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = "\n".join(self._last_lines)
        self._last_lines.clear()
        story = f"its last lines were:\n{last}\n" if last else ""
        return f"{story}the process of worker {self.label} died ({how})"
