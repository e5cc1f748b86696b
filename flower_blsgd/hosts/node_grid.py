"""The local grid behind a node with several devices: one worker process for each device."""

import contextlib
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from flwr.app import Context, Message, RecordDict

from ..errors import UsageError
from ..protocol import Failure
from ..runtime.devices import Machine, WorkerSpec, parse_workers
from ..runtime.flower_internals import CRASHED, NODE_GONE
from ..runtime.local_grid import LocalGrid

DEVICES = "devices"
"""The key of the node config that names them."""

_OF_ONE_WORKER = (
    *("device", "tier", "steps", "slowdown"),
    *("seconds-per-step", "seconds-per-step-alone"),
)
_PACKAGE_ROOT = Path(__file__).parents[2]

NodeConfig = Mapping[str, bool | float | int | str]


class NodeGrid:
    """The local grid of a node's own workers.

    Their processes start with the first message, and end with `close` or with this process. The
    message of a process that dies fails, and the process starts again.

    Parameters
    ----------
    context : Context
        The node's: its config names the devices.
    client_app : str
        ``module:attribute``.
    app_dir : Path
        Where that module is.

    Raises
    ------
    UsageError
        If the devices cannot be used.
    """

    def __init__(self, context: Context, client_app: str, app_dir: Path) -> None:
        workers = node_workers(context.node_config)
        threads = context.run_config.get("threads", 0)
        with _package_importable():
            self._grid = LocalGrid(
                workers,
                client_app,
                app_dir,
                dict(context.run_config),
                threads if isinstance(threads, int) else 0,
            )
        self._node_ids = list(self._grid.get_node_ids())

    @property
    def ranks(self) -> range:
        """The ranks of the workers within this node, from 0 on."""
        return range(len(self._node_ids))

    def send(
        self, contents: Mapping[int, RecordDict], kind: str
    ) -> tuple[dict[int, RecordDict], dict[int, Failure]]:
        """Send a message to each of these workers, all at once, and wait for the replies.

        Parameters
        ----------
        contents : mapping of int to RecordDict
            By rank.
        kind : str
            Type of the messages.

        Returns
        -------
        tuple of dict
            By rank, in order: the replies, and the failures of the others.
        """
        ranks = {self._node_ids[p]: p for p in sorted(contents) if p in self.ranks}
        messages = [Message(contents[rank], node, kind) for node, rank in ranks.items()]
        replies: dict[int, RecordDict] = {}
        failures = {
            rank: Failure(NODE_GONE, f"this node has no device {rank}")
            for rank in contents
            if rank not in self.ranks
        }
        for reply in self._grid.send_and_receive(messages):
            rank = ranks[reply.metadata.src_node_id]
            if reply.has_error():
                reason = (reply.error.reason or "").strip()
                failures[rank] = Failure(reply.error.code, reason)
            else:
                replies[rank] = reply.content
        return dict(sorted(replies.items())), dict(sorted(failures.items()))

    def send_again_if_died(
        self, contents: Mapping[int, RecordDict], kind: str
    ) -> tuple[dict[int, RecordDict], dict[int, Failure]]:
        """Do as `send`, and once more with those whose process died: it has started again."""
        replies, failures = self.send(contents, kind)
        died = {rank: contents[rank] for rank, f in failures.items() if f.code == CRASHED}
        if died:
            more, still = self.send(died, kind)
            others = {rank: f for rank, f in failures.items() if rank not in died}
            replies, failures = dict(sorted((replies | more).items())), others | still
        return replies, failures

    def close(self) -> None:
        """End all worker processes. May be called twice."""
        self._grid.close()


@contextlib.contextmanager
def _package_importable() -> Iterator[None]:
    """Let the processes of a grid that is made meanwhile import this very package.

    In a SuperNode it may be the app's bundle that holds it, which no fresh interpreter finds.
    """
    before = os.environ.get("PYTHONPATH")
    if Path(sysconfig.get_path("purelib")) == _PACKAGE_ROOT:
        yield
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def node_workers(node_config: NodeConfig, machine: Machine | None = None) -> list[WorkerSpec]:
    """Return the workers of a node with ``devices='4x cuda:0; 2x cpu'``.

    Where the node has a name, that of each begins with it: ``box-1/0``, or ``box-1/quick`` for
    one with a name of its own.

    Raises
    ------
    UsageError
        If the text cannot be read, a device is missing, or another key contradicts it.
    """
    for key in _OF_ONE_WORKER:
        if key in node_config:
            raise UsageError(
                f"{key} = {node_config[key]!r} in the node config does not go with devices = "
                f"{node_config[DEVICES]!r}; write it into the group that it is for"
            )
    try:
        workers = parse_workers(str(node_config[DEVICES]), machine)
    except UsageError as error:
        raise UsageError(f"devices in the node config: {error}") from None
    name = str(node_config.get("name", ""))
    return _named(workers, name) if name else workers


def _named(workers: list[WorkerSpec], name: str) -> list[WorkerSpec]:
    digits = len(str(len(workers) - 1))  # so that names sort as the ranks do
    return [
        replace(worker, name=f"{name}/{worker.name or f'{rank:0{digits}d}'}")
        for rank, worker in enumerate(workers)
    ]
