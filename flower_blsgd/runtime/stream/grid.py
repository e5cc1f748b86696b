"""A Flower grid whose messages take a stream instead of Flower's polling."""

import contextlib
import logging
import statistics
import threading
import time
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

from flwr.app import Error, Message
from flwr.serverapp import Grid

from ..flower_internals import (
    NODE_GONE,
    Run,
    give_message_id,
    release_records_at_once,
    superlink_of,
)
from ..mailbox import Mailbox
from ..mailbox_grid import MailboxGrid
from .addresses import own_addresses
from .broadcast import Broadcast
from .letters import Encoder
from .membership import Membership
from .server import StreamServer, split_address
from .wire_dtype import WireDtype

_LOG = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_LOST_SECONDS = 1.5
"""How long a round waits for a broken connection to come back."""

_END_SECONDS = 1.5
_ANY_HOST = ("", "0.0.0.0", "[::]")


class StreamGrid(MailboxGrid):
    """Carries messages over long-lived streams that the nodes open to this process.

    One ordinary Flower message per node opens its session; from then on a message takes
    milliseconds. The node must serve sessions (`serve_sessions`). One that does not, or that
    cannot connect, gets Flower's plain messages, and the log names it.

    If a connection breaks, the node has 1.5 seconds to come back before its messages get an
    error reply, as from a node that is gone; the others go on. It is on the grid again as soon
    as it is connected again. A SuperNode that starts anew is asked in by itself.

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
        self._watcher.join(_WATCH_SECONDS + 5)
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
        time.sleep(0.2)  # so that what ends them is sent

    @property
    def port(self) -> int:
        """Where it listens."""
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
        while time.monotonic() < deadline and not self._members.settled(there):
            time.sleep(0.02)
        for node_id in self._members.unsettled(there):
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
                self._server.links[node_id].submit(encoder.letter(message))
            elif transport == "messages":
                plain.append(message)
            else:
                reason = f"node {node_id} is not connected"
                self._mailbox.receive(Message(Error(NODE_GONE, reason), reply_to=message))
        if plain:
            self._push_plain(plain)
        return ids

    def _push_plain(self, messages: list[Message]) -> None:
        given = [message.metadata.message_id for message in messages]
        with self._grid_lock:
            pushed: list[str | None] = list(self._grid.push_messages(messages))
            # What Flower does not take is None; if that is too large, there is nothing at all.
            sent = list(zip_longest(messages, given, pushed[: len(given)]))
            self._plain_messages |= {own: ours for _, ours, own in sent if own is not None}
        for message, ours, own in sent:
            message.metadata.__dict__["_message_id"] = ours  # Flower gave it another
            if own is None:
                reason = "Flower did not take the message; the lines above say why"
                self._mailbox.receive(Message(Error(NODE_GONE, reason), reply_to=message))

    def _watch(self) -> None:
        """Look after nodes that come and go.

        The regular calls are also how this process learns that the run was stopped.
        """
        next_look = 0.0
        while not self._closed.wait(0.1):
            self._members.give_up_lost(_LOST_SECONDS)
            if time.monotonic() < next_look:
                continue
            try:
                with self._grid_lock:
                    self._look()
            except Exception as error:  # the SuperLink may be back at the next look
                _LOG.warning("the SuperLink does not answer: %s", error)
            next_look = time.monotonic() + (0.3 if self._plain_messages else _WATCH_SECONDS)

    def _look(self) -> None:
        invitations = self._members.update(set(self._grid.get_node_ids()))
        if invitations:
            pushed = self._grid.push_messages([message for _, message in invitations])
            nodes = [node_id for node_id, _ in invitations]
            self._members.invited(zip(nodes, pushed, strict=True))
        if self._members.sessions:
            self._members.take_answers(self._grid.pull_messages(list(self._members.sessions)))
        if self._plain_messages:
            for reply in self._grid.pull_messages(list(self._plain_messages)):
                given = self._plain_messages.pop(reply.metadata.reply_to_message_id, "")
                reply.metadata.__dict__["_reply_to_message_id"] = given
                self._mailbox.receive(reply)
