"""A Flower grid of worker processes on this machine, each pinned to its own device."""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from flwr.app import Context, Message, RecordDict

from .devices import WorkerSpec
from .flower_internals import (
    Run,
    become_server,
    empty_run,
    give_message_id,
    release_records_at_once,
)
from .mailbox import Mailbox
from .mailbox_grid import MailboxGrid
from .open_files import allow_open_files
from .process_host import HostSettings, ProcessHost
from .reactor import Reactor
from .shared_arrays import Packer
from .shared_pool import Pool
from .shipping import ship
from .worker_process import Job

Config = Mapping[str, bool | float | int | str]

_FIRST_NODE_ID = 100
_FILES, _FILES_PER_WORKER = 256, 12
"""Open files: a socket, and two for each of the few blocks that a worker has."""
_RUN_ID = 1


class LocalGrid(MailboxGrid):
    """Runs any Flower ClientApp in worker processes that are pinned to their devices.

    Arrays travel in shared memory. A reply's arrays are views on it, in a form that Flower's own
    strategies take as theirs; a ClientApp gets copies, unless it called `accept_views`.

    The processes start with the first message, so that everything that can be refused is
    refused before. They end with `close`, at the end of a ``with`` block, and when this process
    dies in any way.

    If a worker's process dies, the message that it had fails at once with an error reply, the
    others go on, and the process starts again with empty state. A process that dies three times
    without answering a message in between is not started again: its workers leave the grid.

    Parameters
    ----------
    workers : sequence of WorkerSpec
        One node each; its partition id is its place.
    client_app : str
        ``module:attribute``.
    app_dir : Path
        Where that module is.
    run_config : mapping
        Given to the ClientApp as ``context.run_config``.
    threads : int (default: 0)
        Compute threads of each worker; 0 for one per core of it.
    processes_per_device : int (default: 0)
        Put the workers of a device, or of the same cores, into so many processes; 0 gives each
        worker its own. Those of a process take turns on a CPU, and run side by side on an
        accelerator. A worker with a slowdown always has its own.
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
        processes_per_device: int = 0,
        setup: Callable[[], object] | None = None,
    ) -> None:
        become_server(_RUN_ID)
        allow_open_files(_FILES + _FILES_PER_WORKER * len(workers))
        release_records_at_once()
        self._run = empty_run(_RUN_ID)
        self.workers = tuple(workers)
        super().__init__(Mailbox())
        self._pool = Pool()
        self._hosts: list[ProcessHost] = []
        self._host_of: dict[int, ProcessHost] = {}
        reactor = Reactor()
        parcel = None if setup is None else ship(setup, Pool("sharing the data with the workers"))
        settings = HostSettings(threads, parcel)
        sys_path = tuple(str(Path(folder).resolve()) for folder in sys.path)  # "" is this folder
        for places in _shared_out(self.workers, processes_per_device):
            contexts = {
                _FIRST_NODE_ID + place: self._context(place, run_config) for place in places
            }
            worker = self.workers[places[0]]
            has_setup = parcel is not None
            job = Job(worker, contexts, client_app, app_dir, sys_path, has_setup)
            names = [self.workers[place].name for place in places]
            label = "+".join(filter(None, names)) or (
                f"{worker.device_with_cores} (node {', '.join(map(str, contexts))})"
            )
            host = ProcessHost(job, settings, label, self._mailbox, reactor)
            self._hosts.append(host)
            self._host_of |= dict.fromkeys(contexts, host)
        self._host_of = dict(sorted(self._host_of.items()))
        self._finalizer = weakref.finalize(self, _close_all, self._hosts, reactor)

    def _context(self, place: int, run_config: Config) -> Context:
        node_config = {
            "partition-id": place,
            "num-partitions": len(self.workers),
            **self.workers[place].to_node_config(),
        }
        node_id = _FIRST_NODE_ID + place
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
        found = {node_id: host.process_id for node_id, host in self._host_of.items()}
        return {node_id: pid for node_id, pid in found.items() if pid is not None}

    @property
    def shared_bytes(self) -> int:
        """Bytes of all shared buffers for messages and states that exist now, here and there."""
        return self._pool.num_bytes + sum(host.attached_bytes for host in self._hosts)

    def state_of(self, node_id: int) -> RecordDict:
        """Return what a node keeps in shared memory, such as momentum, without asking it.

        Views: while the node handles a message they may be half written. Empty after its
        process died.
        """
        return self._host_of[node_id].states.get(node_id, RecordDict())

    def set_run(self, run: Run) -> None:
        """Set the run that this grid operates in."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that this grid operates in."""
        return self._run

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes whose worker has not been given up."""
        return [node_id for node_id, host in self._host_of.items() if not host.given_up]

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
                if node_id not in self._host_of:
                    raise ValueError(f"node {node_id} is not on this grid: {sorted(self._host_of)}")
                message_id = give_message_id(message)
                parcel = packer.pack(message)
                self._mailbox.expect(message_id)
                ids.append(message_id)
                self._host_of[node_id].submit(message, parcel)
        except BaseException:  # nobody will ask for the replies to those already handed over
            self._mailbox.forget(ids)
            self._mailbox.take(ids)
            raise
        return ids


def _shared_out(workers: Sequence[WorkerSpec], processes_per_device: int) -> list[list[int]]:
    """Return the places of the workers in each process."""
    if processes_per_device == 0:
        return [[place] for place in range(len(workers))]
    alone, together = [], dict[str, list[int]]()
    for place, worker in enumerate(workers):
        if worker.slowdown == 1.0:
            together.setdefault(worker.device_with_cores, []).append(place)
        else:
            alone.append([place])
    for places in together.values():
        count = min(processes_per_device, len(places))
        alone += [places[first::count] for first in range(count)]
    return alone


def _close_all(hosts: Sequence[ProcessHost], reactor: Reactor) -> None:
    for host in hosts:
        host.begin_close()
    for host in hosts:
        host.finish_close()
    reactor.close()
