"""One node of the local grid: a thread that feeds a worker process, and revives it."""

import logging
import os
import queue
import threading

from flwr.app import Error, Message

from .child_process import ChildDiedError, ChildProcess
from .flower_internals import CRASHED, NODE_GONE
from .mailbox import Mailbox
from .pinning import environment
from .worker_process import Job

_LOG = logging.getLogger(__name__)

_MAX_DEATHS = 3
_JOIN_SECONDS = 10.0


class WorkerHandle:
    """Serves messages with a worker process, one at a time; every message gets a reply.

    Parameters
    ----------
    job : Job
        What the process is for.
    threads : int
        Compute threads; 0 for one per core.
    mailbox : Mailbox
        Takes every reply, error replies included. A message whose reply nobody waits for any
        more is not begun.
    """

    def __init__(self, job: Job, threads: int, mailbox: Mailbox) -> None:
        self._job = job
        self._environment = {**os.environ, **environment(job.worker, threads)}
        self._mailbox = mailbox
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._child: ChildProcess | None = None
        self._lock = threading.Lock()  # between starting a process and closing
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
        child = self._child
        return child.process_id if child is not None and child.alive else None

    def submit(self, message: Message) -> None:
        """Queue a message; the process starts with the first one."""
        if self._closing:
            reason = f"worker {self.label} is closed"
            self._mailbox.receive(Message(Error(NODE_GONE, reason), reply_to=message))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()
        self._inbox.put(message)

    def begin_close(self) -> None:
        """Ask the process to end."""
        with self._lock:
            self._closing = True
            if self._child is not None:
                self._child.terminate()
        self._inbox.put(None)

    def finish_close(self) -> None:
        """Wait until the process is gone; kill it if it does not go."""
        if self._child is not None:
            self._child.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _serve(self) -> None:
        while (message := self._inbox.get()) is not None:
            if not self._mailbox.expects(message.metadata.message_id):
                continue
            try:
                reply = self._reply_to(message)
            except Exception as error:  # without an answer the sender would wait for ever
                reason = f"worker {self.label}: {type(error).__name__}: {error}"
                reply = Message(Error(CRASHED, reason), reply_to=message)
            if not self._closing:
                self._mailbox.receive(reply)

    def _reply_to(self, message: Message) -> Message:
        try:
            reply = self._living_child().exchange(message)
        except ChildDiedError as death:
            if not self._closing:
                self._count_death()
            reason = f"worker {self.label}: the process {death}"
            return Message(Error(CRASHED, reason), reply_to=message)
        except _GivenUpError:
            reason = f"worker {self.label} died {_MAX_DEATHS} times and is given up"
            return Message(Error(NODE_GONE, reason), reply_to=message)
        self._deaths = 0
        return reply

    def _living_child(self) -> ChildProcess:
        """Return the process; a dead one is replaced, so no message is lost with it."""
        if self._child is not None and not self._child.alive and not self._closing:
            _LOG.warning("worker %s: the process %s", self.label, self._child.obituary())
            self._count_death()
        if self._child is None:
            self._start()
        if self._child is None:
            raise _GivenUpError
        return self._child

    def _start(self) -> None:
        with self._lock:
            if not self._closing and not self.given_up:
                self._child = ChildProcess(self._job, self._environment, self._on_line)

    def _count_death(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.close()
                self._child = None
        self._deaths += 1
        if self._deaths >= _MAX_DEATHS:
            self.given_up = True
            _LOG.error("worker %s died %d times in a row: given up", self.label, _MAX_DEATHS)
        else:
            _LOG.warning("worker %s starts again", self.label)
            self._start()

    def _on_line(self, line: str) -> None:
        _LOG.info("[%s] %s", self.label, line)


class _GivenUpError(Exception):
    """No process will be started any more."""
