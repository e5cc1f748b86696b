"""A Flower grid that uses streams instead of polling, and the nodes that it lists."""

import contextlib
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, cast, get_args

from flwr.app import Context, Error, Message
from flwr.serverapp import Grid

from ...errors import UsageError, printable
from ...flower.internals import (
    NODE_GONE,
    Run,
    add_exit_handler,
    give_message_id,
    has_no_handler,
    is_deployment,
    release_records_at_once,
    superlink_of,
)
from ..mailbox import Mailbox, MailboxGrid
from .codec import encode_messages
from .encoded_arrays import Broadcast, WireDtype
from .request import STREAM_MESSAGE, StreamRequest, StreamResult
from .security import own_addresses, split_address
from .server import StreamServer

_LOG = logging.getLogger(__name__)

Transport = Literal["auto", "stream", "messages"]

_POLL_SECONDS = 0.5
_END_SECONDS = 1.5
_CLOSE_SECONDS = 7.0
_ANY_HOST = ("", "0.0.0.0", "[::]")

_STREAM_TTL_SECONDS = 30 * 86_400.0
_MOST_STREAMS = 5
_STREAMS_SECONDS = 300.0
"""A node that needs this many streams within this time is excluded."""


@contextlib.contextmanager
def stream(
    grid: Grid,
    context: Context,
    transport: Transport | None = None,
    address: str | None = None,
    wire_dtype: WireDtype | None = None,
) -> Iterator[Grid]:
    """Provide a faster grid for a ServerApp within a ``with`` block.

    Parameters
    ----------
    grid, context
        Arguments of the ServerApp's function.
    transport : {"auto", "stream", "messages"}, optional
        ``"auto"`` streams on a deployment and returns other grids unchanged. ``"messages"`` returns
        every grid unchanged. ``"stream"`` rejects other grids. None reads the run config's
        ``transport``, which defaults to ``"auto"``.
    address : str, optional
        Address of `StreamGrid`. None reads the run config's ``stream-address``.
    wire_dtype : {"float32", "bfloat16", "float16"}, optional
        Dtype of `StreamGrid`. None reads the run config's ``wire-dtype``.

    Yields
    ------
    Grid
        A `StreamGrid`, or `grid` unchanged.

    Raises
    ------
    UsageError
        If `transport` is unknown or does not fit the grid, or the address cannot be used.

    Examples
    --------
    ::

        @app.main()
        def main(grid, context):
            with flower_blsgd.stream(grid, context) as streams:
                strategy.start(streams, initial_arrays)
    """
    settings = context.run_config
    if transport is None:
        transport = cast(Transport, settings.get("transport", "auto"))
    if address is None:
        address = str(settings.get("stream-address", ""))
    if wire_dtype is None:
        wire_dtype = cast(WireDtype, settings.get("wire-dtype", "float32"))
    if transport not in get_args(Transport):
        raise UsageError(f'transport = "{transport}"; use "auto", "stream" or "messages"')
    if wire_dtype not in get_args(WireDtype):
        raise UsageError(f'wire-dtype = "{wire_dtype}"; use "float32", "bfloat16" or "float16"')
    if transport == "stream" and not is_deployment(grid):
        raise UsageError(
            f'transport = "stream" needs a SuperLink and SuperNodes, and this is a '
            f'{type(grid).__name__}; use "auto"'
        )
    if transport == "messages" or not is_deployment(grid):
        yield grid
        return
    with StreamGrid(grid, address, wire_dtype) as streams:
        # If the run is stopped, this block is left without `close`.
        add_exit_handler(streams.end_at_once)
        streams.wait_until_connected()
        yield streams


class StreamGrid(MailboxGrid):
    """A Flower grid whose messages travel over long-lived streams from the nodes to this process.

    Provisional: may change in any minor version.

    One ordinary Flower message per node opens a stream. Later messages take milliseconds. The app
    of the node must serve streams (`serve_sessions`). A node without streams, or that cannot
    connect, gets Flower's plain messages, and a log line names it.

    If a connection breaks, the grid does not list the node until it reconnects. Messages to it wait
    until the caller's timeout, while other nodes continue. A reply that the node computed meanwhile
    arrives if it is still expected. When Flower reports that the node is gone, its messages get an
    error reply. A SuperNode that restarts gets a new stream.

    Parameters
    ----------
    grid : Grid
        Flower's own grid of a deployment.
    address : str (default: "")
        ``HOST:PORT`` for nodes to connect to, or ``:PORT`` to choose only the port. Empty uses the
        addresses of this machine and a free port.
    wire_dtype : {"float32", "bfloat16", "float16"} (default: "float32")
        Dtype of float32 models on the wire. With 16 bits, they are sent as differences from the
        previous model, and the rounding error is added to the next difference (error feedback).
        This halves the traffic.
    connect_seconds : float (default: 30)
        Maximum time that `wait_until_connected` waits.

    Raises
    ------
    UsageError
        If the server cannot listen on the address.
    """

    def __init__(
        self,
        grid: Grid,
        address: str = "",
        wire_dtype: WireDtype = "float32",
        connect_seconds: float = 30.0,
    ) -> None:
        release_records_at_once()
        self._grid = grid
        self._grid_lock = threading.Lock()  # Flower does not document its grid as thread-safe
        super().__init__(Mailbox())
        self._connect_seconds = connect_seconds
        self._wire_dtype = wire_dtype
        self._broadcasts: dict[str, Broadcast] = {}
        self._server = StreamServer(address, self._mailbox)
        self._members = Membership(grid, self._server, self._addresses(address), wire_dtype)
        self._plain_messages: set[str] = set()  # ids of the messages that Flower carries
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="stream-watcher", daemon=True)
        self._watcher.start()

    def _addresses(self, address: str) -> list[str]:
        host = split_address(address)[0] if address else ""
        hosts = [host] if host not in _ANY_HOST else own_addresses(superlink_of(self._grid))
        return [f"{host}:{self._server.port}" for host in hosts]

    def close(self) -> None:
        """End all streams, and wait briefly for the nodes' answers. May be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._server.end()
        self._watcher.join(_CLOSE_SECONDS)  # it may wait for a SuperLink that is gone
        self._server.stop(0.2)

    def end_at_once(self) -> None:
        """End all streams without waiting, in an exit handler."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._server.end()
        time.sleep(0.2)  # time to send the ends

    @property
    def wire_errors(self) -> Mapping[str, float]:
        """Mean relative error of the models that the nodes received, by the name of the record.

        The error of a model is the root mean square of its difference from the exact model, divided
        by the root mean square of the exact model. Empty for ``"float32"``.
        """
        return {
            name: statistics.fmean(broadcast.errors)
            for name, broadcast in self._broadcasts.items()
            if broadcast.errors
        }

    @property
    def transports(self) -> Mapping[int, str]:
        """Transport of each node on the grid, ``"stream"`` or ``"messages"``, by node id."""
        return self._members.transports

    @property
    def connected_nodes(self) -> Collection[int]:
        """Nodes with a stream."""
        return {node_id for node_id, how in self.transports.items() if how == "stream"}

    def wait_until_connected(self) -> None:
        """Wait until every present node is connected or known to be unable to connect."""
        deadline = time.monotonic() + self._connect_seconds
        with self._grid_lock:
            there = set(self._grid.get_node_ids())
        while time.monotonic() < deadline and self._members.awaited(there):
            time.sleep(0.02)
        for node_id in self._members.awaited(there):
            _LOG.warning(
                "node %d has not connected to the stream within %.0f s; the run continues without "
                "it, and it joins once it is connected",
                node_id,
                self._connect_seconds,
            )

    def set_run(self, run: Run) -> None:
        """Set the run of this grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run of this grid."""
        return self._grid.run

    def get_node_ids(self) -> Iterable[int]:
        """Return the reachable nodes, except those that still work on a late message."""
        busy = set(self._mailbox.late.values())
        return [node_id for node_id in self.transports if node_id not in busy]

    def get_nodes(self) -> Iterable[Any]:
        """Return the SuperLink's records of these nodes."""
        reachable = set(self.get_node_ids())
        with self._grid_lock:
            nodes = self._grid.get_nodes()
        return [node for node in nodes if node.node_id in reachable]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages to their nodes. A message to an unreachable node gets an error reply.

        Raises
        ------
        FrameError
            If a message holds arrays that a stream cannot carry.
        """
        ids: list[str] = []
        streamed: list[Message] = []
        transports = self.transports
        try:
            for message in messages:
                node_id = message.metadata.dst_node_id
                if transports.get(node_id) == "messages":
                    ids.append(self._push_plain(message))
                    continue
                ids.append(give_message_id(message))
                self._mailbox.expect(ids[-1])
                if self._members.has_link(node_id):
                    streamed.append(message)
                else:
                    self._refuse(message, f"node {node_id} is not connected")
            for encoded in encode_messages(streamed, self._broadcasts, self._wire_dtype):
                self._server.links[encoded.message.metadata.dst_node_id].submit(encoded)
        except BaseException:  # the caller gets no ids, so it cannot fetch any reply
            self._mailbox.forget(ids)
            raise
        return ids

    def _push_plain(self, message: Message) -> str:
        """Send a message through Flower's own grid; return its id, which Flower chooses."""
        with self._grid_lock:
            # Flower returns None for a refused message, and nothing for one that is too large.
            for message_id in filter(None, self._grid.push_messages([message])):
                self._mailbox.expect(message_id)
                self._plain_messages.add(message_id)
                return message_id
        message_id = give_message_id(message)
        self._mailbox.expect(message_id)
        self._refuse(message, "Flower did not accept it; see the log lines above")
        return message_id

    def _refuse(self, message: Message, reason: str) -> None:
        self._mailbox.receive(Message(Error(NODE_GONE, reason), reply_to=message))

    def _watch(self) -> None:
        """Open streams with new nodes, and handle the end of streams.

        Through these regular calls, this process also learns that the run was stopped.
        """
        while not self._closed.is_set():
            try:
                with self._grid_lock:
                    self._members.update()
                    self._members.take_answers()
                    for reply in self._grid.pull_messages(list(self._plain_messages)):
                        self._plain_messages.discard(reply.metadata.reply_to_message_id)
                        self._mailbox.receive(reply)
            except Exception as error:  # the SuperLink may answer the next poll
                _LOG.warning("the SuperLink does not answer: %s", error)
            self._closed.wait(_POLL_SECONDS)
        deadline = time.monotonic() + _END_SECONDS
        with contextlib.suppress(Exception), self._grid_lock:
            # Flower refuses answers that arrive after the run.
            while self._members.take_answers() and time.monotonic() < deadline:
                time.sleep(0.05)


class Membership:
    """The nodes of a stream grid and their streams.

    A node whose app serves no sessions, or that cannot connect, gets plain messages from then on.
    After any other end of a stream, the node gets a new one, a limited number of times.
    `addresses` are those of the server.

    Only one thread may change it. Other threads may read: sets are replaced, never changed.
    """

    def __init__(
        self, grid: Grid, server: StreamServer, addresses: list[str], wire_dtype: WireDtype
    ) -> None:
        self._grid = grid
        self._server = server
        self._addresses = addresses
        self._wire_dtype = wire_dtype
        self._online: set[int] = set()
        self._streams: dict[str, int] = {}  # by the id of the message that opened it
        self._activated: dict[int, str] = {}  # start time of each SuperNode, from Flower
        self._requested_at: dict[int, deque[float]] = {}
        self._plain: set[int] = set()
        self._excluded: set[int] = set()

    @property
    def transports(self) -> Mapping[int, str]:
        """Transport of each reachable node."""
        links = list(self._server.links.items())
        found = {node_id: "stream" for node_id, link in links if link.connected}
        return found | dict.fromkeys(self._plain & self._online, "messages")

    def has_link(self, node_id: int) -> bool:
        """Return whether a node has a stream, connected or not."""
        link = self._server.links.get(node_id)
        return link is not None and link.was_connected and not link.over

    def awaited(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes that are not connected yet, but may still connect."""
        return sorted(set(nodes) - set(self.transports) - self._excluded)

    def update(self) -> None:
        """Query Flower for the nodes, and open a stream with every new one."""
        activated = {node.node_id: node.last_activated_at for node in self._grid.get_nodes()}
        self._online = set(activated)
        restarted = {n for n, at in activated.items() if self._activated.get(n, at) != at}
        for message_id, node_id in list(self._streams.items()):
            if node_id in restarted:
                del self._streams[message_id]  # unknown to the new SuperNode
                self._server.links[node_id].close("its SuperNode started again")
        self._plain = self._plain - restarted
        self._excluded = self._excluded - restarted
        for node_id in restarted:  # it does not know the old messages either
            self._server.mailbox.settle(node_id)
        self._activated |= activated
        busy = set(self._streams.values()) | self._plain | self._excluded
        nodes = sorted(self._online - busy)
        if nodes:
            sent = self._grid.push_messages([self._request(node_id) for node_id in nodes])
            for node_id, message_id in zip(nodes, sent, strict=True):
                if message_id:  # otherwise the node has left
                    self._streams[message_id] = node_id

    def _request(self, node_id: int) -> Message:
        times = self._requested_at.setdefault(node_id, deque(maxlen=_MOST_STREAMS))
        times.append(time.monotonic())
        link = self._server.open_link(node_id)
        request = StreamRequest(
            self._addresses, self._server.certificate, link.token, self._wire_dtype
        )
        return Message(request.to_records(), node_id, STREAM_MESSAGE, ttl=_STREAM_TTL_SECONDS)

    def take_answers(self) -> int:
        """Handle the streams that ended, and return the number of open streams."""
        if self._streams:
            for answer in self._grid.pull_messages(list(self._streams)):
                self._ended(self._streams.pop(answer.metadata.reply_to_message_id), answer)
        return len(self._streams)

    def _ended(self, node_id: int, answer: Message) -> None:
        link = self._server.links[node_id]
        if answer.has_error():
            reason = (answer.error.reason or f"error {answer.error.code}").strip()
            connected = link.was_connected
            plain = has_no_handler(answer.error)
        else:
            result = StreamResult.from_reply(answer)
            reason = result.reason
            connected = result.connected
            plain = not result.connected
        reason = printable(reason)  # it goes into logs
        link.close(reason or "its session ended")
        times = self._requested_at[node_id]
        if plain:
            if answer.has_error():
                reason = "its ClientApp serves no sessions; add serve_sessions(app)"
            self._plain = self._plain | {node_id}
            _LOG.warning(
                "node %d is not on the stream: %s. It gets Flower's plain messages, about 6 s each",
                node_id,
                reason,
            )
        elif not connected or (
            len(times) == _MOST_STREAMS and times[-1] - times[0] < _STREAMS_SECONDS
        ):
            self._excluded = self._excluded | {node_id}
            _LOG.error("node %d is left out: %s", node_id, reason)
