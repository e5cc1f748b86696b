"""A Flower grid of worker processes on this machine, each pinned to its own device."""

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from .devices import WorkerSpec
from .flower_internals import Run, become_server, empty_run, give_message_id
from .mailbox import Mailbox
from .worker_handle import WorkerHandle
from .worker_process import Job

_LOG = logging.getLogger(__name__)

Config = Mapping[str, bool | float | int | str]

_FIRST_NODE_ID = 100
_RUN_ID = 1


class LocalGrid(Grid):
    """Runs any Flower ClientApp in one process per worker.

    The processes start with the first message, so that everything that can be refused is
    refused before. They end with `close`, at the end of a ``with`` block, and when this process
    dies in any way.

    If a worker's process dies, the message that it had fails at once with an error reply, the
    others go on, and the process starts again with empty state. A worker that dies three times
    without answering a message in between is taken off the grid.

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
    """

    def __init__(
        self,
        workers: Sequence[WorkerSpec],
        client_app: str,
        app_dir: Path,
        run_config: Config,
        threads: int = 0,
    ) -> None:
        become_server(_RUN_ID)
        self._run = empty_run(_RUN_ID)
        self.workers = tuple(workers)
        self._mailbox = Mailbox()
        self._handles: dict[int, WorkerHandle] = {}
        for place, worker in enumerate(workers):
            node_id = _FIRST_NODE_ID + place
            node_config = {
                "partition-id": place,
                "num-partitions": len(workers),
                **worker.to_node_config(),
            }
            context = Context(_RUN_ID, node_id, node_config, RecordDict(), dict(run_config))
            job = Job(worker, client_app, app_dir, context)
            self._handles[node_id] = WorkerHandle(job, threads, self._mailbox)
        self._finalizer = weakref.finalize(self, _close_all, list(self._handles.values()))

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
        found = {node_id: handle.process_id for node_id, handle in self._handles.items()}
        return {node_id: pid for node_id, pid in found.items() if pid is not None}

    def set_run(self, run: Run) -> None:
        """Set the run that this grid operates in."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that this grid operates in."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message (deprecated in Flower; use ``Message(...)``)."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes whose worker has not been given up."""
        return [node_id for node_id, handle in self._handles.items() if not handle.given_up]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to their workers; each works on one at a time.

        Raises
        ------
        ValueError
            If a message is for a node that this grid does not have.
        """
        ids = []
        for message in messages:
            node_id = message.metadata.dst_node_id
            if node_id not in self._handles:
                raise ValueError(f"node {node_id} is not on this grid: {sorted(self._handles)}")
            message_id = give_message_id(message)
            self._mailbox.expect(message_id)
            self._handles[node_id].submit(message)
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; each is returned once."""
        return self._mailbox.take(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and wait for the replies, at most `timeout` seconds.

        A reply that comes later is dropped.
        """
        ids = list(self.push_messages(messages))
        self._mailbox.wait(ids, timeout)
        self._mailbox.forget(ids)
        return self._mailbox.take(ids)


def _close_all(handles: Sequence[WorkerHandle]) -> None:
    for handle in handles:
        handle.begin_close()
    for handle in handles:
        handle.finish_close()
