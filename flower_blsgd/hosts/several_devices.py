"""A Flower mod for nodes with several devices: train on each of them, and average the models."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

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
    TRAIN_SUM,
    Failure,
    HostOrders,
    HostReply,
    ProfileQuery,
    TrainOrder,
    WorkerProfile,
)
from ..runtime.flower_internals import RAISED
from ..runtime.stream.client import at_session_end, in_session
from ..strategy.replies import CheckedReply, ModelShape, check_reply
from .node_grid import DEVICES, NodeGrid

_LOG = logging.getLogger(__name__)


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
        except NoWorkerAnsweredError as error:
            return Message(Error(error.code or RAISED, str(error)), reply_to=message)

    return answer_or_call_next


class _Node:
    """The local grid behind this process's node, as long as the node's session lasts."""

    def __init__(self, client_app: str, app_dir: Path) -> None:
        self._client_app, self._app_dir = client_app, app_dir
        self._grid: NodeGrid | None = None
        self._lock = threading.Lock()  # a session may end while a message is handled

    def __reduce__(self) -> tuple[type["_Node"], tuple[str, Path]]:
        # Flower's simulation sends the app to its actors by value, and a lock cannot travel.
        return _Node, (self._client_app, self._app_dir)

    def answer(self, message: Message, context: Context) -> Message:
        devices = context.node_config[DEVICES]
        if not in_session():
            raise UsageError(
                f"devices = {devices!r} in the node config: its workers live as long as a session "
                'does, and this run has none; use transport = "stream", or start one SuperNode '
                "for each device"
            )
        if message.metadata.message_type == TRAIN_SUM:
            raise UsageError(
                f"devices = {devices!r} in the node config: slow workers sum models on the "
                "local grid only; use blsgd run"
            )
        return answer(message, context, self._node_grid(context))

    def _node_grid(self, context: Context) -> NodeGrid:
        with self._lock:
            if self._grid is None:
                self._grid = NodeGrid(context, self._client_app, self._app_dir)
                at_session_end(self._close)
            return self._grid

    def _close(self) -> None:
        with self._lock:
            grid, self._grid = self._grid, None
        if grid is not None:
            grid.close()


class NoWorkerAnsweredError(Exception):
    """No worker behind the node handled the message; the text says why, in one line.

    Parameters
    ----------
    failures : mapping of int to Failure
        By rank, at least one.
    """

    def __init__(self, failures: Mapping[int, Failure]) -> None:
        reasons = "; ".join(f"device {rank}: {f.brief}" for rank, f in failures.items())
        super().__init__(f"no device of this node answered ({reasons})")
        self.code = next(iter(failures.values())).code
        """Flower's error code of the first of them."""


def answer(message: Message, context: Context, grid: NodeGrid) -> Message:
    """Answer a message for all workers behind this node.

    One that is not meant for several, as Flower's own strategies send it, goes to the first.

    Raises
    ------
    NoWorkerAnsweredError
        If there is nothing to reply but failures of workers that have no order of their own.
    ProtocolError
        If the message is not what it must be.
    """
    kind = message.metadata.message_type
    if kind == QUERY_PROFILE:
        return _answer_query(message, context, grid)
    if HOST not in message.content.config_records:
        return _answer_first(message, grid)
    return _answer_evaluate(message, grid) if kind == EVALUATE else _answer_train(message, grid)


def _answer_query(message: Message, context: Context, grid: NodeGrid) -> Message:
    """Reply with the profiles of the workers; those whose speed is queried measure at once."""
    kind = message.metadata.message_type
    query = ProfileQuery.from_message(message)
    ranks = query.ranks or tuple(grid.ranks)
    contents = dict.fromkeys(ranks, replace(query, ranks=()).to_records())
    replies, failures = grid.send_again_if_died(contents, kind)
    number = int(context.node_config.get("partition-id", -1))
    parts = {}
    for rank, reply in replies.items():
        try:
            (profile,) = WorkerProfile.list_from_reply(Message(reply, reply_to=message))
        except ValueError as error:
            failures[rank] = Failure(0, str(error))
            continue
        # Its own number is its rank here, and other hosts have such workers as well.
        own = replace(profile, partition_id=number).to_reply(message)
        parts[rank] = RecordDict({PROFILE: own.content[PROFILE]})
    if not parts:
        raise NoWorkerAnsweredError(failures)
    return HostReply(parts, failures).to_reply(message)


def _answer_evaluate(message: Message, grid: NodeGrid) -> Message:
    """Let each worker evaluate its slice of the test set; the sums go back as they are."""
    orders = HostOrders.from_message(message)
    replies, failures = grid.send(orders.contents, message.metadata.message_type)
    return HostReply(replies, failures).to_reply(message)


def _answer_train(message: Message, grid: NodeGrid) -> Message:
    """Let the workers train, and reply with the average of their models.

    Their replies are checked as the server would: one that cannot be used counts 0, and its
    model is not in the average.
    """
    host_orders = HostOrders.from_message(message)
    rule = NodeAveraging(
        host_orders.worker_weight, tuple(host_orders.update_norms), tuple(host_orders.moving)
    )
    keys = host_orders.arrays_key, host_orders.config_key
    orders = {
        rank: TrainOrder.from_content(content, *keys)
        for rank, content in host_orders.contents.items()
    }
    model_shape = ModelShape(next(iter(orders.values())).arrays)
    replies, failures = grid.send(host_orders.contents, message.metadata.message_type)
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
        _LOG.warning("device %d counts 0: %s", rank, failure.brief)
    return HostReply(parts, failures, _averaged(checked, rule)).to_reply(message)


def _answer_first(message: Message, grid: NodeGrid) -> Message:
    replies, failures = grid.send({0: message.content}, message.metadata.message_type)
    if not replies:
        raise NoWorkerAnsweredError(failures)
    return Message(replies[0], reply_to=message)


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
