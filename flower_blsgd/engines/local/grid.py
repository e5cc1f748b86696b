"""A Flower grid of worker processes on this machine, each pinned to its own device."""

import contextlib
import contextvars
import functools
import logging
import os
import platform
import queue
import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict

from ...devices.interpreter import interpreter
from ...devices.pinning import environment
from ...devices.worker_spec import WorkerSpec
from ...errors import UsageError
from ...flower.app_call import PROCESS_ENDS
from ...flower.internals import (
    CRASHED,
    NODE_GONE,
    Run,
    become_server,
    empty_run,
    give_message_id,
    release_records_at_once,
)
from ..mailbox import Mailbox, MailboxGrid
from .fork_server import start_fork_server
from .shared_memory import BufferPool, Payload, PlacedRecords, pack
from .shipping import ship
from .worker_process import PROGRAM_SECONDS, Job, WorkerProcess

_LOG = logging.getLogger(__name__)

Config = Mapping[str, bool | float | int | str]

_FIRST_NODE_ID = 100
_FILES = 256
_FILES_PER_WORKER = 12
"""Open files per worker: a socket, and two for each of its few blocks of shared memory."""
_RUN_ID = 1
_JOIN_SECONDS = 10.0


class LocalGrid(MailboxGrid):
    """A Flower grid that runs any ClientApp in one process per worker, pinned to its device.

    Provisional: may change in any minor version.

    Arrays travel in shared memory. Strategies and ClientApps get copies when they read an array; a
    ClientApp gets views if `accept_views` was called for it.

    The processes start with the first message, after all checks. They end with `close`, at the end
    of a ``with`` block, and when this process ends for any reason.

    If a worker's process dies, its message fails immediately with an error reply. The other workers
    continue, and the process restarts with empty state. A process that has not answered within the
    timeout of `send_and_receive` is killed and restarts, too.

    Parameters
    ----------
    workers : sequence of WorkerSpec
        The workers, one per node. The partition id is the position in this sequence, from 0.
    client_app : str
        The app as ``module:attribute``.
    app_dir : Path
        Folder of that module.
    run_config : mapping
        The run config of the ClientApp. Its setting ``threads``, if present, is the number of
        compute threads of each worker; 0 for one per core.
    setup : callable, optional
        Function to call in every process before the app is loaded. It is pickled by value, so it
        may be defined anywhere. Large tensors in it are moved to shared memory.
    on_line : callable, optional
        ``(rank, line)``, called in a thread with every line that a worker prints; logged by
        default.
    shown : int (default: -1)
        Rank of a worker that prints where this process prints.
    own_cards : bool (default: False)
        Let each process see its own GPU only, as ``cuda:0``.
    node_config : mapping, optional
        Further keys for the node config of all workers.

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
        on_line: Callable[[int, str], None] | None = None,
        shown: int = -1,
        own_cards: bool = False,
        node_config: Config | None = None,
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
            for worker in self.workers:
                _refuse_other_python(worker)
            payload = ship(setup, BufferPool("sharing the data with the workers"))
        start_fork_server()  # in the background, until the first message
        threads = run_config.get("threads", 0)
        threads = threads if isinstance(threads, int) else 0
        self._nodes: dict[int, WorkerNode] = {}
        self._idle_deaths: queue.SimpleQueue[int] = queue.SimpleQueue()
        for rank, worker in enumerate(self.workers):
            context = self._context(rank, run_config, node_config or {})
            variables = environment(worker, threads, workers, own_cards)
            shows = rank == shown
            job = Job(worker, threads, variables, context, client_app, app_dir, payload, shows)
            node = WorkerNode(job, self._mailbox, self._idle_deaths)
            if on_line is not None:
                node.on_line = functools.partial(on_line, rank)
            self._nodes[context.node_id] = node
        self._pid = os.getpid()
        # Not `weakref.finalize`: multiprocessing waits for its processes at exit.
        self._finalizer = Finalize(self, _close_all, (self._nodes,), exitpriority=0)

    def _context(self, rank: int, run_config: Config, further: Config) -> Context:
        node_config = {
            **further,
            "partition-id": rank,
            "num-partitions": len(self.workers),
            **self.workers[rank].to_node_config(self.workers),
        }
        node_id = _FIRST_NODE_ID + rank
        return Context(_RUN_ID, node_id, node_config, RecordDict(), dict(run_config))

    def close(self) -> None:
        """End all worker processes and wait for them. May be called twice."""
        if os.getpid() == self._pid:  # else in a fork
            _close_all(self._nodes)  # at exit again if it is interrupted
            self._finalizer.cancel()

    def end_restarts(self) -> None:
        """Leave processes that end from now on ended."""
        for node in self._nodes.values():
            node.restarts = False

    def end_programs(self, seconds: float = PROGRAM_SECONDS) -> dict[int, int]:
        """Let all idle processes with a main program end by themselves; return their exit codes.

        A program that still runs gets a KeyboardInterrupt. After `seconds`, processes are killed.
        """
        began = time.monotonic()
        ending = {node_id: node.hang_up() for node_id, node in self._nodes.items()}
        for limit in sorted({PROGRAM_SECONDS, seconds}):
            for node_id, process in ending.items():
                left = max(0.0, began + limit - time.monotonic())
                if process is not None and process.wait(left) is None:
                    who = f"threads, children or exit functions of {self._nodes[node_id].label}"
                    then = "are killed" if limit == seconds else f"may for {seconds:.0f} s"
                    _LOG.warning("%s still run after %.0f s and %s", who, limit, then)
                    if limit == seconds:
                        process.kill()
        return {node_id: process.wait() or 0 for node_id, process in ending.items() if process}

    def take_deaths(self) -> list[int]:
        """Return the nodes whose process died between two messages, each death once."""
        return [self._idle_deaths.get() for _ in range(self._idle_deaths.qsize())]

    def set_run(self, run: Run) -> None:
        """Set the run of this grid."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run of this grid."""
        return self._run

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes, including those whose process is about to restart."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Pass messages to their workers, each of which handles one at a time.

        Raises
        ------
        ValueError
            If a message is addressed to an unknown node.
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
        except BaseException:  # the caller gets no ids, so it cannot fetch any reply
            self._mailbox.forget(ids)
            raise
        return ids

    def _stop_late(self) -> None:
        for node in self._nodes.values():
            node.stop_late()


class WorkerNode:
    """The worker process of a node, restarted when it ends; every message gets a reply.

    A thread handles one message after another, and skips those whose reply is no longer expected.
    `idle_deaths` receives the node's id whenever its process died between two messages.
    """

    def __init__(self, job: Job, mailbox: Mailbox, idle_deaths: "queue.SimpleQueue[int]") -> None:
        self._job = job
        self._mailbox = mailbox
        self._idle_deaths = idle_deaths
        worker = job.worker
        node_id = job.context.node_id
        self.label = worker.name or f"{worker.device_with_cores} (node {node_id})"
        self._waiting: queue.SimpleQueue[tuple[Message, Payload] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: WorkerProcess | None = None
        self._handled = ""  # the id of a message
        self.restarts = True  # after a failure
        # Garbage collection may close this node in any thread, also in one that has the lock.
        self._lock = threading.RLock()
        self._closing = False
        self.on_line: Callable[[str], None] = functools.partial(_LOG.info, "[%s] %s", self.label)

    def submit(self, message: Message, payload: Payload) -> None:
        """Queue a message. The process starts with the first one."""
        with self._lock:
            if self._closing:
                self._fail(message)
                return
            self._waiting.put((message, payload))
            if self._thread is None:
                run = contextvars.copy_context().run  # its warnings are those of this run
                self._thread = threading.Thread(target=run, args=(self._serve,), daemon=True)
                self._thread.start()

    def stop_late(self) -> None:
        """Kill the process if it works on a late message; it starts again."""
        with self._lock:
            process = self._process  # the thread may bury it meanwhile
            if process is not None and self._handled in self._mailbox.late:
                _LOG.warning("worker %s did not answer in time and is killed", self.label)
                process.kill()

    def hang_up(self) -> WorkerProcess | None:
        """Send the process no more messages; return it, or None if it is absent or busy."""
        with self._lock:
            self.restarts = False
            process = self._process
            if process is None or self._handled:
                return None
            process.hang_up()
            return process

    def begin_close(self) -> None:
        """Refuse further messages, and end the process."""
        with self._lock:
            self._closing = True
            process = self._process
            if process is not None:
                process.kill()
            self._waiting.put(None)

    def finish_close(self) -> None:
        """Wait for the end of the process and the thread."""
        process = self._process
        thread = self._thread
        if process is not None:
            process.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _serve(self) -> None:
        """Handle messages until `begin_close`, in the thread."""
        while self._handle_next():
            pass
        process = self._process
        self._process = None
        if process is not None:  # started meanwhile
            process.close()

    def _handle_next(self) -> bool:
        """Handle the next message, and keep no reference to it: its memory is used again."""
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
                del waiting, payload  # before the reply arrives
                self._receive(message, process)
            except Exception as error:  # the sender waits for a reply
                self._fail(message, f"{type(error).__name__}: {error}")
            with self._lock:
                self._handled = ""
        return True

    def _living_process(self) -> WorkerProcess:
        """Return the process, or a new one if it died or was never started."""
        process = self._process
        if process is not None and process.ended and self.restarts:
            if not process.killed:
                self._idle_deaths.put(self._job.context.node_id)
            self._bury()
        if self._closing:
            raise EOFError
        return self._process or self._start_process()

    def _receive(self, message: Message, process: WorkerProcess) -> None:
        """Wait for the reply to the message, and pass it to the mailbox."""
        try:
            reply = process.receive()
        except (EOFError, OSError):
            if self._closing:
                raise
            self._fail(message, f"the process {self._bury()}")
            if self.restarts:
                self._start_process()  # during the rest of the round
        else:
            process_ends = reply.has_error() and reply.error.code == PROCESS_ENDS
            self._mailbox.receive(reply)
            if process_ends and self.restarts:
                self._bury(PROGRAM_SECONDS)
                self._start_process()

    def _start_process(self) -> WorkerProcess:
        process = WorkerProcess(self._job, self.on_line)
        with self._lock:
            self._process = process
            if self._closing:  # `finish_close` waits for this thread
                process.kill()
        return process

    def _bury(self, *seconds: float) -> str:
        """Release the resources of the process, and return how it died."""
        process = self._process
        assert process is not None
        how = process.end(*seconds)  # it may still run, with a broken pipe
        if self.restarts:
            self._process = None
            last = how.rpartition("\n")[2]
            _LOG.warning("worker %s starts again: the process %s", self.label, last)
        return how

    def _fail(self, message: Message, reason: str = "") -> None:
        error = Error(CRASHED, f"worker {self.label}: {reason}")
        if self._closing:
            error = Error(NODE_GONE, f"worker {self.label} is closed")
        self._mailbox.receive(Message(error, reply_to=message))


def _refuse_other_python(worker: WorkerSpec) -> None:
    """Raise UsageError if functions cannot be pickled for the interpreter of a worker."""
    if not worker.python:
        return
    its, ours = interpreter(worker.python).versions["Python"], platform.python_version()
    if its.split(".")[:2] != ours.split(".")[:2]:
        raise UsageError(
            f"workers: python={worker.python} is Python {its}, and this one {ours}; a task from "
            "Python needs the same two numbers"
        )


def _allow_open_files(count: int) -> None:
    """Raise the limit of open files to `count` if allowed: shared memory needs files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < count:  # a negative number is no limit
        with contextlib.suppress(OSError, ValueError):
            new = count if hard < 0 else min(count, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))


def _close_all(nodes: Mapping[int, WorkerNode]) -> None:
    for node in nodes.values():
        node.begin_close()
    for node in nodes.values():
        node.finish_close()
