"""A Flower mod for nodes with several devices: train on each of them, and average the models.

Behind such a node is a local grid: one worker process for each device, with a rank from 0 on.
"""

import functools
import logging
import os
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import Grid

from ..algorithm.averaging import AnyArray, NodeAveraging, average_by_load
from ..array_records import view_record
from ..errors import UsageError
from ..protocol import (
    ARRAYS,
    EVALUATE,
    HOST,
    METRICS,
    MOMENTUM,
    MOMENTUM_LOADS,
    NUM_EXAMPLES,
    PROFILE,
    QUERY_PROFILE,
    Failure,
    HostOrders,
    HostReply,
    ProfileQuery,
    TrainOrder,
    WorkerProfile,
)
from ..runtime.devices import Machine, WorkerSpec, parse_workers
from ..runtime.flower_internals import CRASHED, NODE_GONE, RAISED
from ..runtime.local_grid import LocalGrid
from ..runtime.stream.session import at_session_end, in_session
from ..strategy.replies import CheckedReply, ModelShape, check_reply

_LOG = logging.getLogger(__name__)

DEVICES = "devices"
"""The key of the node config that names them."""

_OF_ONE_WORKER = (
    *("device", "tier", "steps", "slowdown"),
    *("seconds-per-step", "seconds-per-step-alone"),
)
_PACKAGE_ROOT = Path(__file__).parents[2]

NodeConfig = Mapping[str, bool | float | int | str]

Sent = tuple[dict[int, RecordDict], dict[int, Failure]]
"""By rank: the replies to a message, and the failures of the other workers."""

Send = Callable[[Mapping[int, RecordDict]], Sent]
"""Sends each worker, by rank, the content of a message, and waits for the replies."""


def several_devices(client_app: str, app_dir: Path) -> Mod:
    """Return a mod for a ClientApp whose node may have ``devices='4x cuda:0; 2x cpu'``.

    Such a node starts a worker process for each device, with this same app. They live as long as
    the node's session: without a session each message would start them all, and is answered with
    an error of one line. Every other node is left as it is.

    Parameters
    ----------
    client_app : str
        The app that it is for, as ``module:attribute``.
    app_dir : Path
        Where that module is.

    Examples
    --------
    ::

        app = ClientApp(mods=[several_devices(f"{__name__}:app", Path(__file__).parents[1])])
    """
    node = _Node(client_app, app_dir)

    def answer_or_call_next(
        message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        if DEVICES not in context.node_config:
            return call_next(message, context)
        try:
            return node.answer(message, context)
        except UsageError as error:  # in one line, without a traceback
            return Message(Error(RAISED, str(error)), reply_to=message)

    return answer_or_call_next


class _Node:
    """The local grid behind this process's node, as long as the node's session lasts."""

    # A session may end while a message is handled. Not the object's own: Flower's simulation sends
    # the app to its actors by value, and a lock cannot travel.
    _lock = threading.Lock()

    def __init__(self, client_app: str, app_dir: Path) -> None:
        self._client_app, self._app_dir = client_app, app_dir
        self._grid: LocalGrid | None = None
        self._node_ids: Sequence[int] = ()

    def answer(self, message: Message, context: Context) -> Message:
        if not in_session():
            raise UsageError(
                f"devices = {context.node_config[DEVICES]!r} in the node config: its workers live "
                'as long as a session does, and this run has none; use transport = "stream", or '
                "start one SuperNode for each device"
            )
        with self._lock:
            if self._grid is None:
                self._grid = node_grid(context, self._client_app, self._app_dir)
                self._node_ids = list(self._grid.get_node_ids())
                at_session_end(self._close)
            grid = self._grid
        return answer(message, context, grid, self._node_ids)

    def _close(self) -> None:
        with self._lock:
            grid, self._grid = self._grid, None
        if grid is not None:
            grid.close()


def node_grid(context: Context, client_app: str, app_dir: Path) -> LocalGrid:
    """Return the local grid of the workers that a node's config names.

    Their processes start with the first message, and end with `close` or with this process. The
    message of a process that dies fails, and the process starts again.

    Raises
    ------
    UsageError
        If the devices cannot be used.
    """
    workers = node_workers(context.node_config)
    threads = context.run_config.get("threads", 0)
    if Path(sysconfig.get_path("purelib")) != _PACKAGE_ROOT:
        # In a SuperNode it may be the app's bundle that holds this package: the processes of the
        # workers would not find it.
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(_PACKAGE_ROOT) not in paths:
            paths.insert(0, str(_PACKAGE_ROOT))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return LocalGrid(
        workers,
        client_app,
        app_dir,
        dict(context.run_config),
        threads if isinstance(threads, int) else 0,
    )


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
    if not name:
        return workers
    digits = len(str(len(workers) - 1))  # so that names sort as the ranks do
    return [
        replace(worker, name=f"{name}/{worker.name or f'{rank:0{digits}d}'}")
        for rank, worker in enumerate(workers)
    ]


def answer(message: Message, context: Context, grid: Grid, node_ids: Sequence[int]) -> Message:
    """Answer a message for the workers behind this node, whose nodes on `grid` are given by rank.

    One that is not meant for several, as Flower's own strategies send it, goes to the first. If
    nobody answers a message in which no worker has an order of its own, the reply is an error.

    Raises
    ------
    ProtocolError
        If the message is not what it must be.
    """
    kind = message.metadata.message_type
    send = functools.partial(_send, grid, node_ids, kind)
    if kind == QUERY_PROFILE:
        return _answer_query(message, context, send, range(len(node_ids)))
    if HOST not in message.content.config_records:
        replies, failures = send({0: message.content})
        if not replies:
            return _nobody_answered(message, failures)
        return Message(replies[0], reply_to=message)
    orders = HostOrders.from_message(message)
    if kind == EVALUATE:  # each its slice of the test set; the sums go back as they are
        return HostReply(*send(orders.contents)).to_reply(message)
    return _train(orders, send).to_reply(message)


def _answer_query(message: Message, context: Context, send: Send, ranks: Sequence[int]) -> Message:
    """Reply with the profiles of the workers; those whose speed is queried measure at once."""
    query = ProfileQuery.from_message(message)
    contents = dict.fromkeys(query.ranks or ranks, replace(query, ranks=[]).to_records())
    replies, failures = send(contents)
    died = [rank for rank, failure in failures.items() if failure.code == CRASHED]
    if died:  # these processes have started again
        more, still = send({rank: contents[rank] for rank in died})
        replies |= more
        failures = {r: f for r, f in failures.items() if r not in died} | still
    number = int(context.node_config.get("partition-id", -1))
    parts = {}
    for rank, reply in replies.items():
        try:
            (profile,) = WorkerProfile.by_local_rank(Message(reply, reply_to=message)).values()
        except ValueError as error:
            failures[rank] = Failure(0, str(error))
            continue
        # Its own number is its rank here, and other hosts have such workers as well.
        own = replace(profile, partition_id=number).to_reply(message)
        parts[rank] = RecordDict({PROFILE: own.content[PROFILE]})
    if not parts:
        return _nobody_answered(message, failures)
    return HostReply(parts, failures).to_reply(message)


def _train(host_orders: HostOrders, send: Send) -> HostReply:
    """Let the workers train, and return their reports with the average of their models.

    Their replies are checked as the server would: the worker of one that cannot be used
    has weight 0.
    """
    rule = NodeAveraging(
        host_orders.worker_weight, tuple(host_orders.update_norms), tuple(host_orders.moving)
    )
    keys = host_orders.arrays_key, host_orders.config_key
    orders = {
        rank: TrainOrder.from_content(content, *keys)
        for rank, content in host_orders.contents.items()
    }
    model_shape = ModelShape(next(iter(orders.values())).arrays)
    replies, failures = send(host_orders.contents)
    checked: dict[int, CheckedReply] = {}
    parts: dict[int, RecordDict] = {}
    for rank, reply in replies.items():
        try:
            checked[rank] = check_reply(reply, orders[rank], model_shape, host_orders.weighted_by)
        except Exception as error:  # whatever a worker sends, it costs only its own share
            failures[rank] = Failure(0, str(error) or type(error).__name__)
        else:
            own = {n: r for n, r in reply.items() if n not in reply.array_records}
            parts[rank] = RecordDict(own)
    for rank, failure in failures.items():
        _LOG.warning("device %d has weight 0 in this round: %s", rank, failure.brief)
    return HostReply(parts, failures, _averaged(checked, rule))


def _nobody_answered(message: Message, failures: Mapping[int, Failure]) -> Message:
    reasons = "; ".join(f"device {rank}: {f.brief}" for rank, f in failures.items())
    code = next(iter(failures.values())).code or RAISED
    error = Error(code, f"no device of this node answered ({reasons})")
    return Message(error, reply_to=message)


def _send(
    grid: Grid, node_ids: Sequence[int], kind: str, contents: Mapping[int, RecordDict]
) -> Sent:
    """Send a message of a kind to each of these workers, all at once, and wait for the replies."""
    known = range(len(node_ids))
    ranks = {node_ids[rank]: rank for rank in contents if rank in known}
    failures = {
        rank: Failure(NODE_GONE, f"this node has no device {rank}")
        for rank in contents
        if rank not in known
    }
    replies: dict[int, RecordDict] = {}
    messages = [Message(contents[rank], node, kind) for node, rank in ranks.items()]
    for reply in grid.send_and_receive(messages):
        rank = ranks[reply.metadata.src_node_id]
        if reply.has_error():
            failures[rank] = Failure(reply.error.code, (reply.error.reason or "").strip())
        else:
            replies[rank] = reply.content
    return replies, failures


def _averaged(checked: Mapping[int, CheckedReply], rule: NodeAveraging) -> RecordDict:
    """Return the host's own records: the averages, and the samples behind them."""
    counted = [reply for reply in checked.values() if reply.report.num_examples]
    loads = [float(reply.report.num_examples) for reply in counted]
    records = RecordDict({METRICS: MetricRecord({NUM_EXAMPLES: int(sum(loads))})})
    if not counted:
        return records
    steps = [reply.report.completed_steps for reply in counted]
    tensors: dict[str, AnyArray] = rule.average([r.tensors for r in counted], loads, steps)
    records[ARRAYS] = view_record(tensors)
    momentum, behind = average_by_load(
        [reply.momentum for reply in counted],
        [dict.fromkeys(r.momentum, load) for r, load in zip(counted, loads, strict=True)],
    )
    if momentum:
        records[MOMENTUM] = view_record(momentum)
        total_loads = [behind[name] for name in sorted(behind)]
        records[MOMENTUM_LOADS] = ConfigRecord({MOMENTUM_LOADS: total_loads})
    return records
