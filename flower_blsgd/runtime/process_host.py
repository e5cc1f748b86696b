"""A worker process and the nodes that it serves: started when needed, revived when it dies."""

import logging
import os
import threading
from dataclasses import dataclass

from flwr.app import Message, RecordDict

from .child_process import ChildDiedError, ChildProcess
from .pinning import environment
from .shared_arrays import Parcel
from .worker_process import Job

_LOG = logging.getLogger(__name__)

_MAX_DEATHS = 3


class GivenUpError(Exception):
    """No process will be started any more; the message says why."""


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


class ProcessHost:
    """Keeps a worker process going for its nodes.

    On a CPU its nodes are served one after another; on an accelerator side by side, each on a
    lane of its own. If the process dies, it starts again, and its nodes with empty state.

    Parameters
    ----------
    job : Job
        What the process is for; its contexts name the nodes.
    settings : HostSettings
        Threads and setup.
    label : str
        How logs call it.
    """

    def __init__(self, job: Job, settings: HostSettings, label: str) -> None:
        self._job, self._settings, self.label = job, settings, label
        self._environment = {**os.environ, **environment(job.worker, settings.threads)}
        side_by_side = job.worker.device != "cpu"
        self._lanes = {node_id: i * side_by_side for i, node_id in enumerate(job.contexts)}
        self._lane_locks = [threading.Lock() for _ in set(self._lanes.values())]
        self._child: ChildProcess | None = None
        self._lock = threading.Lock()  # between starting a process, counting deaths and closing
        self._deaths = 0
        self._closing = False
        self.given_up = False
        self.states: dict[int, RecordDict] = {}
        """What each node keeps in shared memory, as of its last reply: momentum, for example."""

    @property
    def process_id(self) -> int | None:
        """The process, if it runs."""
        child = self._child
        return child.process_id if child is not None and child.alive else None

    @property
    def attached_bytes(self) -> int:
        """Bytes of the shared buffers that the process made."""
        child = self._child
        return child.attached_bytes if child is not None else 0

    def exchange(self, node_id: int, parcel: Parcel) -> Message:
        """Have a node handle a message, and return the reply; waits while another is handled.

        Raises
        ------
        ChildDiedError
            If the process ends first.
        GivenUpError
            If it died too often.
        Exception
            Whatever starting it or reading its reply raises.
        """
        lane = self._lanes[node_id]
        with self._lane_locks[lane]:
            child = self._living_child()
            try:
                reply, state = child.exchange(parcel, lane)
            except ChildDiedError:
                self._bury(child)
                raise
            self._deaths = 0
            self.states[node_id] = state
            return reply

    def begin_close(self) -> None:
        """Ask the process to end."""
        with self._lock:
            self._closing = True
            if self._child is not None:
                self._child.terminate()

    def finish_close(self) -> None:
        """Wait until the process is gone; kill it if it does not go."""
        if self._child is not None:
            self._child.close()

    def _living_child(self) -> ChildProcess:
        """Return the process; a dead one is replaced, so no message is lost with it."""
        child = self._child
        if child is not None and not child.alive and not self._closing:
            _LOG.warning("worker %s: the process %s", self.label, child.obituary())
            self._bury(child)
        with self._lock:
            if self._child is None and not self._closing and not self.given_up:
                self._start()
            if self._child is None:
                raise GivenUpError(f"worker {self.label} died {_MAX_DEATHS} times and is given up")
            return self._child

    def _start(self) -> None:
        self._child = ChildProcess(
            self._job,
            self._settings.setup,
            len(self._lane_locks),
            self._environment,
            self._on_line,
        )

    def _bury(self, child: ChildProcess) -> None:
        """Count a death, once for all lanes, and start the process again."""
        with self._lock:
            if self._child is not child or self._closing:
                return
            child.close()
            self._child = None
            self.states.clear()
            self._deaths += 1
            if self._deaths >= _MAX_DEATHS:
                self.given_up = True
                _LOG.error("worker %s died %d times in a row: given up", self.label, _MAX_DEATHS)
            else:
                _LOG.warning("worker %s starts again", self.label)
                self._start()

    def _on_line(self, line: str) -> None:
        _LOG.info("[%s] %s", self.label, line)
