"""A Flower grid of worker processes on this machine, each pinned to its own device."""

import contextlib
import io
import resource
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import numpy as np
from flwr.app import Context, Message, RecordDict

from ..array_records import AnyArray, Layout, is_plain
from .devices import WorkerSpec
from .flower_internals import (
    Run,
    become_server,
    empty_run,
    give_message_id,
    release_records_at_once,
)
from .mailbox import Mailbox, MailboxGrid
from .process_host import ProcessHost
from .shared_memory import BlockMemory, BufferPool, Packer, Payload, SharedTensor
from .template_process import prepare_template
from .worker_process import Job

Config = Mapping[str, bool | float | int | str]

_FIRST_NODE_ID = 100
_FILES, _FILES_PER_WORKER = 256, 12
"""Open files: a socket, and two for each of the few blocks that a worker has."""
_RUN_ID = 1
_INLINE_BYTES = 1 << 16
"""Tensors smaller than this travel within what refers to them."""


class LocalGrid(MailboxGrid):
    """Runs any Flower ClientApp, each worker in a process that is pinned to its device.

    Arrays travel in shared memory. A reply's arrays are views on it, in a form that Flower's own
    strategies take as theirs; a ClientApp gets copies, unless it called `accept_views`.

    The processes start with the first message, so that everything that can be refused is
    refused before. They end with `close`, at the end of a ``with`` block, and when this process
    dies in any way.

    If a worker's process dies, the message that it had fails at once with an error reply, the
    others go on, and the process starts again with empty state. A process that dies three times
    without answering a message in between is not started again: its worker leaves the grid.

    Parameters
    ----------
    workers : sequence of WorkerSpec
        One node each; its partition id is its rank: 0 for the first.
    client_app : str
        ``module:attribute``.
    app_dir : Path
        Where that module is.
    run_config : mapping
        Given to the ClientApp as ``context.run_config``.
    threads : int (default: 0)
        Compute threads of each worker; 0 for one per core of it.
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
        threads: int = 0,
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
        prepare_template()  # beside what is done until the first message
        sys_path = tuple(str(Path(folder).resolve()) for folder in sys.path)  # "" is this folder
        self._hosts: dict[int, ProcessHost] = {}
        for rank, worker in enumerate(self.workers):
            context = self._context(rank, run_config)
            job = Job(context, client_app, app_dir, sys_path, has_setup=payload is not None)
            self._hosts[context.node_id] = ProcessHost(worker, job, payload, threads, self._mailbox)
        self._finalizer = weakref.finalize(self, _close_all, list(self._hosts.values()))

    def _context(self, rank: int, run_config: Config) -> Context:
        node_config = {
            "partition-id": rank,
            "num-partitions": len(self.workers),
            **self.workers[rank].to_node_config(),
        }
        node_id = _FIRST_NODE_ID + rank
        return Context(_RUN_ID, node_id, node_config, RecordDict(), dict(run_config))

    def __enter__(self) -> "LocalGrid":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all worker processes and wait until they are gone. May be called twice."""
        self._finalizer()

    @property
    def process_ids(self) -> dict[int, int]:
        """The process of every node that has one now."""
        found = {node_id: host.process_id for node_id, host in self._hosts.items()}
        return {node_id: pid for node_id, pid in found.items() if pid is not None}

    @property
    def shared_bytes(self) -> int:
        """Bytes of all shared buffers for messages and states that exist now, here and there."""
        hosts = self._hosts.values()
        return self._pool.num_bytes + sum(host.attached_bytes for host in hosts)

    def state_of(self, node_id: int) -> RecordDict:
        """Return what a node keeps in shared memory, such as momentum, without asking it.

        Views: while the node handles a message they may be half written. Empty after its
        process died.
        """
        return self._hosts[node_id].state

    def set_run(self, run: Run) -> None:
        """Set the run that this grid operates in."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that this grid operates in."""
        return self._run

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes whose worker has not been given up."""
        return [node_id for node_id, host in self._hosts.items() if not host.given_up]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to their workers; each works on one at a time.

        Raises
        ------
        ValueError
            If a message is for a node that this grid does not have.
        UsageError
            If there is not enough memory for the arrays.
        """
        packer = Packer(self._pool)
        ids: list[str] = []
        try:
            for message in messages:
                node_id = message.metadata.dst_node_id
                if node_id not in self._hosts:
                    raise ValueError(f"node {node_id} is not on this grid: {sorted(self._hosts)}")
                message_id = give_message_id(message)
                payload = packer.pack(message)
                self._mailbox.expect(message_id)
                ids.append(message_id)
                self._hosts[node_id].submit(message, payload)
        except BaseException:  # nobody will ask for the replies to those already handed over
            self._mailbox.forget(ids)
            self._mailbox.take(ids)
            raise
        return ids


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to `count`, as far as the system lets us.

    Shared memory is files. Processes that are started inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def _close_all(hosts: Sequence[ProcessHost]) -> None:
    for host in hosts:
        host.begin_close()
    for host in hosts:
        host.finish_close()


# --- functions and data of the user -----------------------------------------------------------


def ship(content: object, pool: BufferPool) -> Payload:
    """Return an object, ready to be sent by value to worker processes.

    A worker process does not import the user's ``__main__``, so functions and classes from there
    travel whole (cloudpickle). Large tensors and arrays travel as shared memory, once for all
    processes, and copy-on-write: a worker that changes them changes its own copy only.

    Raises
    ------
    UsageError
        If there is not enough memory for its tensors.
    Exception
        Whatever cloudpickle raises of something that cannot travel, such as an open file.
    """
    buffer = io.BytesIO()
    pickler = _ByValue(buffer, pool)
    pickler.dump(content)
    return Payload(buffer.getvalue(), pickler.memories)


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, buffer: io.BytesIO, pool: BufferPool) -> None:
        super().__init__(buffer)
        self.memories: list[BlockMemory] = []
        self._pool = pool
        self._placed: dict[tuple[object, ...], tuple[SharedTensor, AnyArray]] = {}

    def persistent_id(self, content: Any) -> Any:
        """Name the place of a large tensor or array; None pickles everything else as it is."""
        if type(content) in (np.ndarray, np.memmap):
            return self._place(content, is_torch=False)
        memory = _memory_of_tensor(content)
        return None if memory is None else self._place(memory, is_torch=True)

    def _place(self, array: AnyArray, is_torch: bool) -> SharedTensor | None:
        if array.nbytes < _INLINE_BYTES or not is_plain(array):
            return None
        address = array.__array_interface__["data"][0]
        key = (address, array.dtype.str, array.shape, array.strides, is_torch)
        if key not in self._placed:
            memory = self._pool.new_memory(Layout.of([("", array.dtype.str, array.shape)]))
            np.ndarray(array.shape, array.dtype, buffer=memory)[...] = array
            self.memories.append(memory)
            place = SharedTensor(memory.block.number, array.dtype.str, array.shape, is_torch)
            self._placed[key] = place, array  # kept, so that no other gets its address
        return self._placed[key][0]


def _memory_of_tensor(content: Any) -> AnyArray | None:
    """Return a plain CPU tensor's elements; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None or type(content) is not torch.Tensor or content.requires_grad:
        return None
    if content.device.type != "cpu" or content.layout is not torch.strided:
        return None
    try:
        memory: AnyArray = content.numpy()
    except (TypeError, RuntimeError):  # numpy does not know bfloat16, conjugate views and others
        return None
    return memory
