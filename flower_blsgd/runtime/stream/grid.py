"""A Flower grid whose messages take a stream instead of Flower's polling, and who is on it."""

import contextlib
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast, get_args

from flwr.app import Context, Error, Message
from flwr.serverapp import Grid

from ...errors import UsageError
from ..flower_internals import (
    NODE_GONE,
    Run,
    add_exit_handler,
    give_message_id,
    is_deployment,
    release_records_at_once,
    superlink_of,
)
from ..mailbox import Mailbox, MailboxGrid
from .codec import SESSION_MESSAGE, Encoder, SessionRequest, SessionResult
from .model_changes import Broadcast, WireDtype
from .security import own_addresses, split_address
from .server import StreamServer

_LOG = logging.getLogger(__name__)

Transport = Literal["auto", "stream", "messages"]

_POLL_SECONDS = 0.5
_LOST_SECONDS = 1.5
"""How long a round waits for a broken connection to come back."""

_END_SECONDS = 1.5
_ANY_HOST = ("", "0.0.0.0", "[::]")

_SESSION_TTL_SECONDS = 30 * 86_400.0
_MOST_SESSIONS, _SESSIONS_SECONDS = 5, 300.0
"""A node that needs so many in so short a time is excluded."""

_NO_HANDLER = "No train function registered"


@contextlib.contextmanager
def stream(
    grid: Grid,
    context: Context,
    transport: Transport | None = None,
    address: str | None = None,
    wire_dtype: WireDtype | None = None,
) -> Iterator[Grid]:
    """Give a ServerApp a fast grid while the ``with`` block runs.

    Parameters
    ----------
    grid, context
        What Flower gave the ServerApp.
    transport : {"auto", "stream", "messages"}, optional
        ``"auto"`` streams on a deployment and leaves every other grid as it is; ``"messages"``
        always does; ``"stream"`` refuses other grids. None reads the run config's ``transport``,
        else ``"auto"``.
    address : str, optional
        As for `StreamGrid`. None reads the run config's ``stream-address``.
    wire_dtype : {"float32", "bfloat16", "float16"}, optional
        As for `StreamGrid`. None reads the run config's ``wire-dtype``.

    Yields
    ------
    Grid
        The fast grid, or the one given.

    Raises
    ------
    UsageError
        If `transport` is not known or does not fit the grid, or the address cannot be used.

    Examples
    --------
    ::

        @app.main()
        def main(grid, context):
            with flower_blsgd.stream(grid, context) as fast:
                strategy.start(fast, initial_arrays)
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
    with StreamGrid(grid, address, wire_dtype) as fast:
        # A stopped run does not reach the end of this block.
        add_exit_handler(fast.end_at_once)
        fast.wait_until_connected()
        yield fast


class StreamGrid(MailboxGrid):
    """Carries messages over long-lived streams that the nodes open to this process.

    One ordinary Flower message per node opens its session; from then on a message takes
    milliseconds. The node must serve sessions (`serve_sessions`). One that does not, or that
    cannot connect, gets Flower's plain messages, and the log names it.

    If a connection breaks, the node has 1.5 seconds to come back before its messages get an
    error reply, as from a node that is gone; the others go on. It is on the grid again as soon
    as it is connected again. A SuperNode that starts anew gets a session by itself.

    Parameters
    ----------
    grid : Grid
        Flower's own, of a deployment.
    address : str (default: "")
        ``HOST:PORT`` that nodes are to connect to, ``:PORT`` to choose the port alone; empty
        tries this machine's own addresses, on a free port.
    wire_dtype : {"float32", "bfloat16", "float16"} (default: "float32")
        How float32 models travel. In 16 bits they travel as changes to the model before, and
        what rounding took away is part of the next change: half the bytes, other last digits.
    connect_seconds : float (default: 30)
        How long `wait_until_connected` waits for nodes that were there from the start.

    Raises
    ------
    UsageError
        If the address cannot be listened on.
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
        self._grid_lock = threading.Lock()  # Flower's grid does not say that threads may share it
        super().__init__(Mailbox())
        self._connect_seconds = connect_seconds
        self._wire_dtype = wire_dtype
        self._broadcasts: dict[str, Broadcast] = {}
        self._server = StreamServer(address, self._mailbox)
        self._members = Membership(self._server, self._addresses(address), wire_dtype)
        self._plain_messages: dict[str, str] = {}  # id on Flower's grid -> id that we gave
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="stream-watcher", daemon=True)
        self._watcher.start()

    def _addresses(self, address: str) -> tuple[str, ...]:
        host = split_address(address)[0] if address else ""
        hosts = [host] if host not in _ANY_HOST else own_addresses(superlink_of(self._grid))
        return tuple(f"{host}:{self._server.port}" for host in hosts)

    def __enter__(self) -> "StreamGrid":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all sessions, and give the nodes a moment to say that they have. May be repeated."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._server.end()
        self._watcher.join(_POLL_SECONDS + 5)
        deadline = time.monotonic() + _END_SECONDS
        with contextlib.suppress(Exception), self._grid_lock:
            # So that the nodes' answers do not come after the run, when Flower refuses them.
            while self._members.sessions and time.monotonic() < deadline:
                self._members.take_answers(self._grid.pull_messages(self._members.sessions))
                time.sleep(0.1)
        self._server.stop(0.2)

    def end_at_once(self) -> None:
        """End all sessions without waiting; for an exit handler."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._server.end()
        time.sleep(0.2)  # until what ends them is sent

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return self._server.port

    @property
    def wire_errors(self) -> Mapping[str, float]:
        """How far the nodes' models are from the true ones, by the name of the record.

        The mean over all that were sent, of the root mean square of the difference, relative to
        that of the model. Empty for ``"float32"``.
        """
        return {
            name: statistics.fmean(broadcast.errors)
            for name, broadcast in self._broadcasts.items()
            if broadcast.errors
        }

    @property
    def transports(self) -> Mapping[int, str]:
        """How each node on the grid is reached: ``"stream"`` or ``"messages"``."""
        return self._members.transports

    def wait_until_connected(self) -> None:
        """Wait until every node that is there now is connected, or known to be unable to be."""
        deadline = time.monotonic() + self._connect_seconds
        with self._grid_lock:
            there = set(self._grid.get_node_ids())
        while time.monotonic() < deadline and self._members.awaited(there):
            time.sleep(0.02)
        for node_id in self._members.awaited(there):
            _LOG.warning(
                "node %d has not connected to the stream within %.0f s; the run goes on without "
                "it, and it joins when it has",
                node_id,
                self._connect_seconds,
            )

    def set_run(self, run: Run) -> None:
        """Set the run that this grid operates in."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run that this grid operates in."""
        return self._grid.run

    def get_node_ids(self) -> Iterable[int]:
        """Get the nodes that can be reached now."""
        return list(self.transports)

    def get_nodes(self) -> Iterable[Any]:
        """Get what the SuperLink knows of these nodes."""
        reachable = set(self.get_node_ids())
        with self._grid_lock:
            nodes = self._grid.get_nodes()
        return [node for node in nodes if node.node_id in reachable]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages to their nodes. One to a node that is not there gets an error reply."""
        encoder = Encoder(self._wire_dtype, self._broadcasts)
        ids: list[str] = []
        plain: list[Message] = []
        transports = self.transports
        for message in messages:
            message_id = give_message_id(message)
            node_id = message.metadata.dst_node_id
            self._mailbox.expect(message_id)
            ids.append(message_id)
            transport = transports.get(node_id)
            if transport == "stream":
                self._server.links[node_id].submit(encoder.encode(message))
            elif transport == "messages":
                plain.append(message)
            else:
                self._refuse(message, f"node {node_id} is not connected")
        if plain:
            self._push_plain(plain)
        return ids

    def _refuse(self, message: Message, reason: str) -> None:
        self._mailbox.receive(Message(Error(NODE_GONE, reason), reply_to=message))

    def _push_plain(self, messages: list[Message]) -> None:
        given = [message.metadata.message_id for message in messages]
        with self._grid_lock:
            # What Flower does not take is None; if that is too large, there is nothing at all.
            pushed = [*self._grid.push_messages(messages), *[None] * len(messages)]
            for message, ours, own in zip(messages, given, pushed, strict=False):
                message.metadata.__dict__["_message_id"] = ours  # Flower gave it another
                if own is None:
                    self._refuse(message, "Flower did not take it; the lines above say why")
                else:
                    self._plain_messages[own] = ours

    def _watch(self) -> None:
        """Open sessions with nodes that come, and fail the messages of nodes that are gone.

        The regular calls are also how this process learns that the run was stopped.
        """
        next_poll = 0.0
        while not self._closed.wait(0.1):
            self._members.fail_lost(_LOST_SECONDS)
            if time.monotonic() < next_poll:
                continue
            try:
                with self._grid_lock:
                    self._poll()
            except Exception as error:  # the SuperLink may be back at the next poll
                _LOG.warning("the SuperLink does not answer: %s", error)
            next_poll = time.monotonic() + _POLL_SECONDS

    def _poll(self) -> None:
        requests = self._members.update(set(self._grid.get_node_ids()))
        if requests:
            pushed = self._grid.push_messages([message for _, message in requests])
            nodes = [node_id for node_id, _ in requests]
            self._members.requested(zip(nodes, pushed, strict=True))
        if self._members.sessions:
            self._members.take_answers(self._grid.pull_messages(list(self._members.sessions)))
        if self._plain_messages:
            for reply in self._grid.pull_messages(list(self._plain_messages)):
                given = self._plain_messages.pop(reply.metadata.reply_to_message_id, "")
                reply.metadata.__dict__["_reply_to_message_id"] = given
                self._mailbox.receive(reply)


class Membership:
    """Knows which nodes are on a stream grid, and opens their sessions.

    A node whose app serves no sessions, or that cannot connect, gets plain messages from then on.
    One whose session ended otherwise gets a new one, but not for ever.

    Parameters
    ----------
    server : StreamServer
        What nodes connect to.
    addresses : tuple of str
        Where they find it.
    wire_dtype : str
        How float32 models travel.
    """

    def __init__(self, server: StreamServer, addresses: tuple[str, ...], wire_dtype: str) -> None:
        self._server = server
        self._addresses = addresses
        self._wire_dtype = wire_dtype
        self._lock = threading.Lock()
        self._online: set[int] = set()
        self._sessions: dict[str, int] = {}
        self._requested_at: dict[int, deque[float]] = {}
        self._plain: set[int] = set()
        self._excluded: set[int] = set()

    @property
    def sessions(self) -> list[str]:
        """The ids of the messages that opened sessions which have not ended."""
        with self._lock:
            return list(self._sessions)

    @property
    def transports(self) -> Mapping[int, str]:
        """How each node that can be reached now is reached."""
        found = {
            node_id: "stream"
            for node_id, link in list(self._server.links.items())
            if link.connected
        }
        with self._lock:
            return found | dict.fromkeys(self._plain & self._online, "messages")

    def awaited(self, nodes: Iterable[int]) -> list[int]:
        """Return which of these nodes may still connect, but have not yet."""
        return sorted(set(nodes) - set(self.transports) - self._excluded)

    def update(self, online: set[int]) -> list[tuple[int, Message]]:
        """Note who is connected to the SuperLink; return session requests for those without one."""
        with self._lock:
            self._online = online
            busy = set(self._sessions.values()) | self._plain | self._excluded
        return [(node_id, self._request(node_id)) for node_id in sorted(online - busy)]

    def _request(self, node_id: int) -> Message:
        times = self._requested_at.setdefault(node_id, deque(maxlen=_MOST_SESSIONS))
        times.append(time.monotonic())
        link = self._server.open_session(node_id)
        request = SessionRequest(
            self._addresses, self._server.certificate, link.token, self._wire_dtype
        )
        return Message(request.to_records(), node_id, SESSION_MESSAGE, ttl=_SESSION_TTL_SECONDS)

    def requested(self, sessions: Iterable[tuple[int, str | None]]) -> None:
        """Note the ids of the messages that went out; None for one that Flower did not take."""
        with self._lock:
            self._sessions.update((sent, node_id) for node_id, sent in sessions if sent is not None)

    def take_answers(self, answers: Iterable[Message]) -> None:
        """Note sessions that ended, and decide how their nodes are reached from now on."""
        for answer in answers:
            with self._lock:
                node_id = self._sessions.pop(answer.metadata.reply_to_message_id, None)
            if node_id is not None:
                self._ended(node_id, answer)

    def _ended(self, node_id: int, answer: Message) -> None:
        link = self._server.links[node_id]
        if answer.has_error():
            reason = (answer.error.reason or f"error {answer.error.code}").strip()
            result = SessionResult(connected=link.was_connected.is_set(), reason=reason)
            plain = _NO_HANDLER in reason
        else:
            result = SessionResult.from_reply(answer)
            reason, plain = result.reason, not result.connected
        link.close(reason or "its session ended")
        times = self._requested_at[node_id]
        if plain:
            if answer.has_error():
                reason = "its ClientApp serves no sessions; add serve_sessions(app)"
            with self._lock:
                self._plain.add(node_id)
            _LOG.warning(
                "node %d is not on the stream: %s. It gets Flower's plain messages, about 6 s each",
                node_id,
                reason,
            )
        elif not result.connected or (
            len(times) == _MOST_SESSIONS and times[-1] - times[0] < _SESSIONS_SECONDS
        ):
            with self._lock:
                self._excluded.add(node_id)
            _LOG.error("node %d is left out: %s", node_id, reason)

    def fail_lost(self, seconds: float) -> None:
        """Fail the messages of nodes whose connection broke so long ago."""
        for link in list(self._server.links.values()):
            lost_at = link.lost_at
            if lost_at is not None and time.monotonic() - lost_at > seconds:
                link.fail_pending("its connection broke and did not come back in time")
