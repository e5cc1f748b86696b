"""A worker process and the nodes that it serves: started when needed, revived when it dies."""

import collections
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.app import Error, Message, RecordDict

from .child_process import ChildProcess
from .flower_internals import CRASHED, NODE_GONE
from .mailbox import Mailbox
from .pinning import environment
from .reactor import Reactor
from .shared_arrays import Parcel
from .worker_process import Job

_LOG = logging.getLogger(__name__)

_MAX_DEATHS = 3

_AHEAD_BYTES = 1 << 15
"""A message that is sent ahead must fit into the socket: nobody reads it yet."""

_JOIN_SECONDS = 10.0

Work = tuple[Message, Parcel]


@dataclass(frozen=True)
class HostSettings:
    """What all processes of a grid have in common.

    Parameters
    ----------
    threads : int (default: 0)
        Compute threads of each; 0 for one per core of it.
    setup : Parcel, optional
        A function that each calls before it loads the app.
    """

    threads: int = 0
    setup: Parcel | None = None


@dataclass
class _Lane:
    """Messages that are handled one after another."""

    number: int
    waiting: collections.deque[Work] = field(default_factory=collections.deque)
    sent: collections.deque[Work] = field(default_factory=collections.deque)


class ProcessHost:
    """Keeps a worker process going for its nodes; every message gets a reply.

    On a CPU its nodes are served one after another; on an accelerator side by side, each on a
    lane of its own. If the process dies, the messages that it handled fail at once, and it
    starts again, its nodes with empty state.

    Nothing here waits for the process: a message is sent if it can be handled now, else when the
    reactor has the reply to the one before.

    Parameters
    ----------
    job : Job
        What the process is for; its contexts name the nodes.
    settings : HostSettings
        Threads and setup.
    label : str
        How logs call it.
    mailbox : Mailbox
        Takes every reply, error replies included. A message whose reply nobody waits for any
        more is not begun, unless it was sent ahead.
    reactor : Reactor
        Tells when the process has answered.
    """

    def __init__(
        self, job: Job, settings: HostSettings, label: str, mailbox: Mailbox, reactor: Reactor
    ) -> None:
        self._job, self._settings, self.label = job, settings, label
        self._mailbox, self._reactor = mailbox, reactor
        self._environment = {**os.environ, **environment(job.worker, settings.threads)}
        side_by_side = job.worker.device != "cpu"
        self._lanes = [_Lane(i) for i in range(len(job.contexts) if side_by_side else 1)]
        self._lane_of = {
            node_id: self._lanes[i * side_by_side] for i, node_id in enumerate(job.contexts)
        }
        # Several nodes take turns: the next one's message is there when the process is ready.
        # Elsewhere a file descriptor is sent with an answer in between, so nothing may be ahead.
        self._ahead = int(len(job.contexts) > len(self._lanes) and sys.platform == "linux")
        self._child: ChildProcess | None = None
        self._ended = False
        self._lock = threading.RLock()
        self._change: threading.Thread | None = None
        """Starts the process, or buries it, and nothing is sent meanwhile."""
        self._deaths = 0
        self._closing = False
        self.given_up = False
        self.states: dict[int, RecordDict] = {}
        """What each node keeps in shared memory, as of its last reply: momentum, for example."""
        reactor.add_tick(self._look_after)

    @property
    def process_id(self) -> int | None:
        """The process, if it runs."""
        child = self._child
        return child.process_id if child is not None and child.alive else None

    @property
    def attached_bytes(self) -> int:
        """Bytes of the shared buffers that the process made."""
        return self._child.attached_bytes if self._child is not None else 0

    def submit(self, message: Message, parcel: Parcel) -> None:
        """Have a node handle a message; the process starts with the first one."""
        with self._lock:
            if self._closing:
                reason = f"worker {self.label} is closed"
                self._mailbox.receive(Message(Error(NODE_GONE, reason), reply_to=message))
                return
            lane = self._lane_of[message.metadata.dst_node_id]
            lane.waiting.append((message, parcel))
            self._send_on(lane)

    def begin_close(self) -> None:
        """Take no more messages, and ask the process to end."""
        with self._lock:
            self._closing = True
            if self._child is not None:
                self._child.terminate()

    def finish_close(self) -> None:
        """Wait until the process is gone; kill it if it does not go."""
        with self._lock:
            change = self._change
        if change is not None and change is not threading.current_thread():
            change.join(_JOIN_SECONDS)
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            self._unwatch(child)
            child.close()
        with self._lock:  # somebody may still wait
            self._fail_all(NODE_GONE, f"worker {self.label} is closed")

    def _send_on(self, lane: _Lane) -> None:
        """Send what the process can handle now; with the lock."""
        while lane.waiting and not self._mailbox.expects(lane.waiting[0][0].metadata.message_id):
            lane.waiting.popleft()
        if not lane.waiting or self._change is not None or self._closing:
            return
        child = self._child
        if self.given_up:
            reason = f"worker {self.label} died {_MAX_DEATHS} times and is given up"
            self._fail_all(NODE_GONE, reason)
        elif child is None:
            self._begin_change(self._start)
        elif not lane.sent and (self._ended or not child.alive):
            self._begin_change(self._bury)
        else:
            while lane.waiting and self._has_room(lane):
                work = lane.waiting.popleft()
                if not self._mailbox.expects(work[0].metadata.message_id):
                    continue
                lane.sent.append(work)
                try:
                    child.send(work[1], lane.number)
                except OSError:
                    self._begin_change(self._bury)
                    return

    def _has_room(self, lane: _Lane) -> bool:
        small = len(lane.waiting[0][1].payload) < _AHEAD_BYTES
        return not lane.sent or (len(lane.sent) <= self._ahead and small)

    def _on_readable(self, child: ChildProcess, lane: _Lane) -> None:
        with self._lock:
            if child is not self._child or self._change is not None:
                return
            if self._closing:
                self._unwatch(child)
                return
            if not child.poll(lane.number):  # said of another file of this number, long closed
                return
            try:
                reply, state = child.receive(lane.number)
            except (EOFError, OSError):
                self._unwatch(child)
                self._ended = True
                if any(lane.sent for lane in self._lanes):  # else the next message finds out
                    self._begin_change(self._bury)
                return
            except Exception as error:  # without an answer the sender would wait for ever
                reason = f"worker {self.label}: {type(error).__name__}: {error}"
                self._fail(lane.sent.popleft(), CRASHED, reason)
                self._send_on(lane)
                return
            message, _ = lane.sent.popleft()
            self._deaths = 0
            self.states[message.metadata.dst_node_id] = state
            self._send_on(lane)
            self._mailbox.receive(reply)

    def _look_after(self) -> None:
        """Notice a death that a grandchild hides, which holds the socket open."""
        if not self._lock.acquire(blocking=False):
            return  # somebody is busy with it
        try:
            child = self._child
            busy = any(lane.sent for lane in self._lanes)
            if child is None or self._change is not None or self._closing or not busy:
                return
            if not child.alive and not any(child.poll(lane.number) for lane in self._lanes):
                self._begin_change(self._bury)
        finally:
            self._lock.release()

    def _begin_change(self, change: Callable[[], None]) -> None:
        """Start or bury the process, in a thread: nobody else is to wait; with the lock."""
        thread = threading.Thread(target=self._changed, args=(change,), daemon=True)
        thread.start()
        self._change = thread

    def _changed(self, change: Callable[[], None]) -> None:
        try:
            change()
        except Exception as error:  # it cannot be started
            reason = f"worker {self.label}: {type(error).__name__}: {error}"
            with self._lock:
                self._fail_all(CRASHED, reason)
        with self._lock:
            self._change = None
            for lane in self._lanes:
                self._send_on(lane)

    def _start(self) -> None:
        child = ChildProcess(
            self._job, self._settings.setup, len(self._lanes), self._environment, self._on_line
        )
        with self._lock:
            self._child, self._ended = child, False
            if self._closing:  # `finish_close` waits for us
                child.terminate()
                return
            for lane in self._lanes:
                on_readable = functools.partial(self._on_readable, child, lane)
                self._reactor.watch(child.fileno(lane.number), on_readable)

    def _bury(self) -> None:
        """Count a death, fail what the process handled, and start it again."""
        child = self._child
        assert child is not None
        self._unwatch(child)
        child.end()  # it may live, and only the way to it be broken
        reason = f"worker {self.label}: the process {child.obituary()}"
        if not any(lane.sent for lane in self._lanes):  # else the reply says it
            _LOG.warning("%s", reason)
        with self._lock:
            self._child = None
            self.states.clear()
            for lane in self._lanes:
                if lane.sent:
                    self._fail(lane.sent.popleft(), CRASHED, reason)
                lane.waiting.extendleft(reversed(lane.sent))
                lane.sent.clear()
            if self._closing:
                return
            self._deaths += 1
            self.given_up = self._deaths >= _MAX_DEATHS
        if self.given_up:
            _LOG.error("worker %s died %d times in a row: given up", self.label, _MAX_DEATHS)
        else:
            _LOG.warning("worker %s starts again", self.label)
            self._start()

    def _unwatch(self, child: ChildProcess) -> None:
        for lane in self._lanes:
            self._reactor.forget(child.fileno(lane.number))

    def _fail(self, work: Work, code: int, reason: str) -> None:
        self._mailbox.receive(Message(Error(code, reason), reply_to=work[0]))

    def _fail_all(self, code: int, reason: str) -> None:
        for lane in self._lanes:
            for work in (*lane.sent, *lane.waiting):
                self._fail(work, code, reason)
            lane.sent.clear()
            lane.waiting.clear()

    def _on_line(self, line: str) -> None:
        _LOG.info("[%s] %s", self.label, line)
