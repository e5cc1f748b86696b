"""A Flower grid of worker processes on this machine, each pinned to its own device."""

import contextlib
import logging
import queue
import resource
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict

from .flower_internals import (
    CRASHED,
    NODE_GONE,
    Run,
    become_server,
    empty_run,
    give_message_id,
    release_records_at_once,
)
from .fork_server import start_fork_server
from .mailbox import Mailbox, MailboxGrid
from .shared_memory import BufferPool, Payload, PlacedRecords, pack, ship
from .worker_process import Job, WorkerProcess
from .worker_spec import WorkerSpec

_LOG = logging.getLogger(__name__)

Config = Mapping[str, bool | float | int | str]

_FIRST_NODE_ID = 100
_FILES, _FILES_PER_WORKER = 256, 12
"""Open files: a socket, and two for each of the few blocks that a worker has."""
_RUN_ID = 1
_JOIN_SECONDS = 10.0


class LocalGrid(MailboxGrid):
    """Runs any Flower ClientApp, each worker in a process that is pinned to its device.

    Arrays travel in shared memory. A reply's arrays are views on it, in a form that Flower's own
    strategies take as theirs; a ClientApp gets copies, unless it called `accept_views`.

    The processes start with the first message, so that everything that can be refused is
    refused before. They end with `close`, at the end of a ``with`` block, and when this process
    dies in any way.

    If a worker's process dies, the message that it had fails at once with an error reply, the
    others go on, and the process starts again with empty state. So does one that has not answered
    when the time of `send_and_receive` is over.

    Parameters
    ----------
    workers : sequence of WorkerSpec
        One node each; its partition id is its rank: 0 for the first.
    client_app : str
        ``module:attribute``.
    app_dir : Path
        Where that module is.
    run_config : mapping
        Given to the ClientApp as ``context.run_config``. Its setting ``threads``, if it has that,
        is the compute threads of each worker; 0 for one per core of it.
    setup : callable, optional
        Called in every process before it loads the app. It travels by value, so it may be
        defined anywhere; large tensors in it become shared memory.

    Raises
    ------
    UsageError
        If there is not enough memory for the tensors of `setup`.
    """

    def __init__(
        self,
        workers: Sequence[WorkerSpec],
        client_app: str,
        app_dir: Path,
        run_config: Config,
        setup: Callable[[], object] | None = None,
    ) -> None:
        become_server(_RUN_ID)
        _allow_open_files(_FILES + _FILES_PER_WORKER * len(workers))
        release_records_at_once()
        self._run = empty_run(_RUN_ID)
        self.workers = tuple(workers)
        super().__init__(Mailbox())
        self._pool = BufferPool()
        payload = None
        if setup is not None:
            payload = ship(setup, BufferPool("sharing the data with the workers"))
        start_fork_server()  # beside what is done until the first message
        threads = run_config.get("threads", 0)
        threads = threads if isinstance(threads, int) else 0
        self._nodes: dict[int, WorkerNode] = {}
        self._idle_deaths: queue.SimpleQueue[int] = queue.SimpleQueue()
        for rank, worker in enumerate(self.workers):
            context = self._context(rank, run_config)
            job = Job(worker, threads, context, client_app, app_dir, payload)
            self._nodes[context.node_id] = WorkerNode(job, self._mailbox, self._idle_deaths)
        nodes = list(self._nodes.values())
        # Not of `weakref`: at the end of the program multiprocessing waits for its processes.
        self._finalizer = Finalize(self, _close_all, (nodes,), exitpriority=0)

    def _context(self, rank: int, run_config: Config) -> Context:
        node_config = {
            "partition-id": rank,
            "num-partitions": len(self.workers),
            **self.workers[rank].to_node_config(),
        }
        node_id = _FIRST_NODE_ID + rank
        return Context(_RUN_ID, node_id, node_config, RecordDict(), dict(run_config))

    def close(self) -> None:
        """End all worker processes and wait until they are gone. May be called twice."""
        self._finalizer()

    def take_deaths(self) -> list[int]:
        """Return the nodes whose process died while it had no message, each death once."""
        return [self._idle_deaths.get() for _ in range(self._idle_deaths.qsize())]

    def set_run(self, run: Run) -> None:
        """Set the run that this grid operates in."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that this grid operates in."""
        return self._run

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes: one whose process died starts it again."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to their workers; each works on one at a time.

        Raises
        ------
        ValueError
            If a message is for a node that this grid does not have.
        UsageError
            If there is not enough memory for the arrays.
        """
        placed: PlacedRecords = {}
        ids: list[str] = []
        try:
            for message in messages:
                node_id = message.metadata.dst_node_id
                if node_id not in self._nodes:
                    raise ValueError(f"node {node_id} is not on this grid: {sorted(self._nodes)}")
                message_id = give_message_id(message)
                payload = pack(message, self._pool, placed)
                self._mailbox.expect(message_id)
                ids.append(message_id)
                self._nodes[node_id].submit(message, payload)
        except BaseException:  # nobody will ask for the replies to those already handed over
            self._mailbox.forget(ids)
            raise
        return ids

    def _stop_late(self) -> None:
        for node in self._nodes.values():
            node.stop_late()


class WorkerNode:
    """Keeps a worker process going for its node; every message gets a reply.

    A thread takes one message after another.

    Parameters
    ----------
    job : Job
        What the process is for.
    mailbox : Mailbox
        Takes every reply, error replies included. A message whose reply nobody waits for any
        more is not begun.
    idle_deaths : SimpleQueue
        Takes the node's id whenever its process died while it had no message.
    """

    def __init__(self, job: Job, mailbox: Mailbox, idle_deaths: "queue.SimpleQueue[int]") -> None:
        self._job, self._mailbox, self._idle_deaths = job, mailbox, idle_deaths
        worker, node_id = job.worker, job.context.node_id
        self.label = worker.name or f"{worker.device_with_cores} (node {node_id})"
        self._waiting: queue.SimpleQueue[tuple[Message, Payload] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: WorkerProcess | None = None
        self._handled = ""  # the id of a message
        # A grid that is collected may close us in any thread, also in one that has the lock.
        self._lock, self._closing = threading.RLock(), False

    def submit(self, message: Message, payload: Payload) -> None:
        """Have the node handle a message; the process starts with the first one."""
        with self._lock:
            if self._closing:
                self._fail(message)
                return
            self._waiting.put((message, payload))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, daemon=True)
                self._thread.start()

    def stop_late(self) -> None:
        """Kill the process if it handles a message that is late; it starts again."""
        with self._lock:
            process = self._process  # which our thread may bury meanwhile
            if process is not None and self._handled in self._mailbox.late:
                _LOG.warning("worker %s did not answer in time and is killed", self.label)
                process.kill()

    def begin_close(self) -> None:
        """Take no more messages, and ask the process to end."""
        with self._lock:
            self._closing, process = True, self._process
            if process is not None:
                process.terminate()
            self._waiting.put(None)

    def finish_close(self) -> None:
        """Wait until the process is gone; kill it if it does not go."""
        process, thread = self._process, self._thread
        if process is not None:
            process.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _serve(self) -> None:
        """Handle messages until `begin_close`; the thread's function."""
        while self._handle_next():
            pass
        process, self._process = self._process, None
        if process is not None:  # it was started meanwhile
            process.close()

    def _handle_next(self) -> bool:
        """Handle the next message; nothing of it is kept, so that its memory is used again."""
        waiting = self._waiting.get()
        if waiting is None:
            return False
        message, payload = waiting
        if self._mailbox.expects(message.metadata.message_id):
            with self._lock:
                self._handled = message.metadata.message_id
            try:
                process = self._living_process()
                process.send(payload)
                del waiting, payload  # before the reply is there
                self._receive(message, process)
            except Exception as error:  # without an answer the sender would wait for ever
                self._fail(message, f"{type(error).__name__}: {error}")
            with self._lock:
                self._handled = ""
        return True

    def _living_process(self) -> WorkerProcess:
        """Return the process; if it died, or never began, a new one."""
        process = self._process
        if process is not None and process.ended:
            if not process.killed:
                self._idle_deaths.put(self._job.context.node_id)
            self._bury()
        if self._closing:
            raise EOFError
        return self._process or self._start_process()

    def _receive(self, message: Message, process: WorkerProcess) -> None:
        """Wait for the reply to the message that was sent, and pass it on."""
        try:
            reply = process.receive()
        except (EOFError, OSError):
            if self._closing:
                raise
            self._fail(message, f"the process {self._bury()}")
            self._start_process()  # beside the rest of the round
        else:
            self._mailbox.receive(reply)

    def _start_process(self) -> WorkerProcess:
        process = WorkerProcess(self._job, self._on_line)
        with self._lock:
            self._process = process
            if self._closing:  # `finish_close` waits for us
                process.terminate()
        return process

    def _bury(self) -> str:
        """Give back what is left of the process, and return how it died."""
        process = self._process
        assert process is not None
        how = process.end()  # it may live, and only the way to it be broken
        self._process = None
        _LOG.warning("worker %s starts again: the process %s", self.label, how.rpartition("\n")[2])
        return how

    def _fail(self, message: Message, reason: str = "") -> None:
        error = Error(CRASHED, f"worker {self.label}: {reason}")
        if self._closing:
            error = Error(NODE_GONE, f"worker {self.label} is closed")
        self._mailbox.receive(Message(error, reply_to=message))

    def _on_line(self, line: str) -> None:
        _LOG.info("[%s] %s", self.label, line)


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to `count`, as far as the system lets us.

    Shared memory is files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def _close_all(nodes: Sequence[WorkerNode]) -> None:
    for node in nodes:
        node.begin_close()
    for node in nodes:
        node.finish_close()
