"""A Flower mod for nodes with several devices: train on each device, and average the models.

Such a node has a local grid with one worker process per device. The ranks start at 0.
"""

import logging
import os
import sysconfig
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import Grid

from ..devices.machine import Machine
from ..devices.worker_spec import (
    DEVICES,
    OPTIONS,
    NodeConfig,
    WorkerSpec,
    keys_of_the_app,
    parse_workers,
    warn_of_unknown_keys,
)
from ..engines.local.grid import LocalGrid
from ..engines.stream.request import at_stream_end, has_stream
from ..errors import UsageError
from ..flower.app_call import error_of
from ..protocol import (
    EVALUATE,
    HOST,
    PROFILE,
    QUERY_MOMENTUM,
    QUERY_PROFILE,
    Failure,
    HostOrders,
    HostReply,
    TrainOrder,
)
from ..strategy.averaging import average_on_node
from ..strategy.messages import answer_of, replies_to
from ..strategy.replies import CheckedReply, ModelShape, check_reply

_LOG = logging.getLogger(__name__)

_PACKAGE_ROOT = Path(__file__).parents[2]

_QUERY_SECONDS = 600.0
_SHARE_OF_PATIENCE = 0.8


def several_devices(client_app: str, app_dir: Path) -> Mod:
    """Return a mod for a ClientApp whose node may have ``devices='4x cuda:0; 2x cpu'``.

    Provisional: may change in any minor version.

    Such a node starts a worker process for each device, with the same app. The processes live as
    long as the node's stream. Without a stream, each message would start all of them, so messages
    are then answered with a one-line error. Other nodes are not affected.

    Parameters
    ----------
    client_app : str
        The app with this mod, as ``module:attribute``.
    app_dir : Path
        Folder of that module.

    Examples
    --------
    ::

        app = ClientApp(mods=[several_devices(f"{__name__}:app", Path(__file__).parents[1])])
    """
    return _SeveralDevices(client_app, app_dir)


class _SeveralDevices:
    """The mod, with the local grid of this process's node until the node's stream ends."""

    # A stream may end during a message. A class attribute, since Flower's simulation pickles the
    # app, and a lock cannot be pickled.
    _lock = threading.Lock()

    def __init__(self, client_app: str, app_dir: Path) -> None:
        self._client_app = client_app
        self._app_dir = app_dir
        self._grid: LocalGrid | None = None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if DEVICES not in context.node_config:
            return call_next(message, context)
        try:
            return answer(message, context, self._running_grid(context))
        except UsageError as error:  # a SuperNode would reply with a traceback
            return Message(error_of(error), reply_to=message)

    def _running_grid(self, context: Context) -> LocalGrid:
        if not has_stream():
            raise UsageError(
                f"devices = {context.node_config[DEVICES]!r} in the node config needs a session, "
                'and this run has none; use transport = "stream", or start one SuperNode per device'
            )
        with self._lock:
            if self._grid is None:
                self._grid = node_grid(context, self._client_app, self._app_dir)
                at_stream_end(self._close)
            return self._grid

    def _close(self) -> None:
        with self._lock:
            grid = self._grid
            self._grid = None
        if grid is not None:
            grid.close()


def node_grid(context: Context, client_app: str, app_dir: Path) -> LocalGrid:
    """Return the local grid of the workers in a node config.

    UsageError if the devices cannot be used.
    """
    workers = node_workers(context.node_config)
    if Path(sysconfig.get_path("purelib")) != _PACKAGE_ROOT:
        # In a SuperNode, this package may be part of the app's bundle, which the worker processes
        # would not find.
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(_PACKAGE_ROOT) not in paths:
            paths.insert(0, str(_PACKAGE_ROOT))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    own_keys = keys_of_the_app(context.node_config)
    return LocalGrid(workers, client_app, app_dir, dict(context.run_config), node_config=own_keys)


def node_workers(node_config: NodeConfig, machine: Machine | None = None) -> list[WorkerSpec]:
    """Return the workers of a node with ``devices='4x cuda:0; 2x cpu'``.

    ``"auto"`` means the workers that train. If the node has a name, it precedes the name or the
    rank of each worker: ``box-1/quick``, ``box-1/0``.

    UsageError if the text cannot be read, a device is missing, or another key contradicts it.
    """
    warn_of_unknown_keys(node_config)
    for key in ("device", *OPTIONS):
        if key in node_config and key != "name":
            raise UsageError(
                f"{key} = {node_config[key]!r} in the node config cannot be combined with "
                f"devices = {node_config[DEVICES]!r}; write it into a group of devices"
            )
    try:
        workers = parse_workers(str(node_config[DEVICES]), machine)
    except UsageError as error:
        raise UsageError(f"devices in the node config: {error}") from None
    if str(node_config[DEVICES]).strip() == "auto":
        workers = [worker for worker in workers if worker.role == "train"]
    if any(worker.role == "evaluate" for worker in workers):
        raise UsageError(
            "devices in the node config: role=evaluate needs a separate node; start a SuperNode"
        )
    name = str(node_config.get("name", ""))
    if not name:
        return workers
    digits = len(str(len(workers) - 1))  # so that names sort as the ranks do
    return [
        replace(worker, name=f"{name}/{worker.name or f'{rank:0{digits}d}'}")
        for rank, worker in enumerate(workers)
    ]


def answer(message: Message, context: Context, grid: Grid) -> Message:
    """Answer a message for the workers of this node, which are the nodes of `grid` in rank order.

    A message for a single worker, as from Flower's own strategies, goes to the first one.

    ProtocolError if the message is invalid.
    """
    kind = message.metadata.message_type
    if HOST in message.content.config_records:
        orders = HostOrders.from_message(message)
        reply = _send(grid, kind, orders.contents, orders.patience_seconds)
        # Only replies to training orders are averaged.
        passes = kind in (EVALUATE, QUERY_MOMENTUM, QUERY_PROFILE)
        return (reply if passes else _with_average(reply, orders)).to_reply(message)
    if kind == QUERY_PROFILE:
        contents = {rank: message.content for rank, _ in enumerate(grid.get_node_ids())}
        reply = _send(grid, kind, contents, _QUERY_SECONDS)
        for part in reply.parts.values():
            # The number on the local grid is the rank, which is not unique among hosts.
            if profile := part.config_records.get(PROFILE):
                profile["partition-id"] = int(context.node_config.get("partition-id", -1))
        return reply.to_reply(message)
    reply = _send(grid, kind, {0: message.content})
    if failure := reply.failures.get(0):
        return Message(failure.to_error("device 0 of this node: "), reply_to=message)
    return Message(reply.parts[0], reply_to=message)


def _send(
    grid: Grid, kind: str, contents: Mapping[int, RecordDict], patience_seconds: float = 0.0
) -> HostReply:
    """Send a message to each of these workers, and wait for the replies.

    The server waits for `patience_seconds` (0 for no limit). The node waits for a shorter time, so
    that the server gets the other workers' replies.
    """
    nodes = dict(enumerate(grid.get_node_ids()))
    messages = [Message(c, nodes[rank], kind) for rank, c in contents.items() if rank in nodes]
    received = replies_to(grid, messages, _SHARE_OF_PATIENCE * patience_seconds or None)
    parts: dict[int, RecordDict] = {}
    failures: dict[int, Failure] = {}
    for rank in contents:
        found = answer_of(received.get(nodes.get(rank, -1)))
        if rank not in nodes:
            failures[rank] = Failure("gone", f"this node has no device {rank}")
        elif isinstance(found, Failure):
            failures[rank] = found
        else:
            parts[rank] = found
    return HostReply(parts, failures)


def _with_average(reply: HostReply, host_orders: HostOrders) -> HostReply:
    """Return the workers' training reports with the average of their models.

    The replies are checked as on the server. A worker whose reply cannot be used has weight 0.
    """
    keys = host_orders.arrays_key, host_orders.config_key
    orders = {
        rank: TrainOrder.from_content(content, *keys)
        for rank, content in host_orders.contents.items()
    }
    model_shape = ModelShape(next(iter(orders.values())).arrays)
    checked: dict[int, CheckedReply] = {}
    parts: dict[int, RecordDict] = {}
    failures = dict(reply.failures)
    for rank, part in reply.parts.items():
        try:
            checked[rank] = check_reply(part, orders[rank], model_shape, host_orders.weighted_by)
        except Exception as error:  # an invalid reply only costs this worker's contribution
            failures[rank] = Failure.of(error)
        else:
            own = {n: r for n, r in part.items() if n not in part.array_records}
            parts[rank] = RecordDict(own)
    for rank, failure in failures.items():
        _LOG.warning("device %d has weight 0 in this round: %s", rank, failure.brief)
    return HostReply(parts, failures, average_on_node(list(checked.values()), host_orders))
