"""Which nodes are on a stream grid, and how each is reached."""

import logging
import threading
import time
from collections.abc import Iterable, Mapping

from flwr.app import Message

from .invitation import SESSION, Farewell, Invitation
from .server import StreamServer

_LOG = logging.getLogger(__name__)

_SESSION_TTL_SECONDS = 30 * 86_400.0
_MOST_SESSIONS = 5
"""That ended soon, one after another; then a node is left out."""

_SOON_SECONDS = 60.0
_NO_HANDLER = "No train function registered"


class Membership:
    """Invites nodes, and decides who gets plain messages instead.

    Parameters
    ----------
    server : StreamServer
        Where nodes connect to.
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
        self._times_invited: dict[int, int] = {}
        self._invited_at: dict[int, float] = {}
        self._plain: set[int] = set()
        self._left_out: set[int] = set()

    @property
    def sessions(self) -> list[str]:
        """The messages that opened sessions which have not ended."""
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

    def settled(self, nodes: Iterable[int]) -> bool:
        """Whether it is known of each of these nodes how, or that it is not, reached."""
        return not self.unsettled(nodes)

    def unsettled(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes that have been invited and not come yet."""
        settled = set(self.transports) | self._left_out
        return sorted(set(nodes) - settled)

    def update(self, online: set[int]) -> list[tuple[int, Message]]:
        """Note who is connected to the SuperLink; return invitations to those without a session."""
        with self._lock:
            self._online = online
            busy = set(self._sessions.values()) | self._plain | self._left_out
        return [(node_id, self._invitation(node_id)) for node_id in sorted(online - busy)]

    def _invitation(self, node_id: int) -> Message:
        link = self._server.invite(node_id)
        invitation = Invitation(
            self._addresses, self._server.certificate, link.token, self._wire_dtype
        )
        now = time.monotonic()
        if now - self._invited_at.get(node_id, now) > _SOON_SECONDS:
            self._times_invited[node_id] = 0  # the session before was a real one
        self._invited_at[node_id] = now
        self._times_invited[node_id] = self._times_invited.get(node_id, 0) + 1
        return Message(invitation.to_records(), node_id, SESSION, ttl=_SESSION_TTL_SECONDS)

    def invited(self, sessions: Iterable[tuple[int, str | None]]) -> None:
        """Note the ids of the messages that went out; None for one that Flower did not take."""
        with self._lock:
            self._sessions.update((sent, node_id) for node_id, sent in sessions if sent is not None)

    def take_answers(self, answers: Iterable[Message]) -> None:
        """Note sessions that ended, and decide what becomes of their nodes."""
        for answer in answers:
            with self._lock:
                node_id = self._sessions.pop(answer.metadata.reply_to_message_id, None)
            if node_id is not None:
                self._ended(node_id, answer)

    def _ended(self, node_id: int, answer: Message) -> None:
        link = self._server.links[node_id]
        if answer.has_error():
            reason = (answer.error.reason or f"error {answer.error.code}").strip()
            farewell = Farewell(connected=link.greeted.is_set(), reason=reason)
            serves = _NO_HANDLER not in reason
        else:
            farewell, serves = Farewell.from_reply(answer), True
        link.give_up(farewell.reason or "its session ended")
        if not serves:
            self._use_plain(node_id, "its ClientApp serves no sessions; add serve_sessions(app)")
        elif not farewell.connected and not answer.has_error():
            self._use_plain(node_id, farewell.reason)
        elif self._times_invited[node_id] >= _MOST_SESSIONS or not farewell.connected:
            with self._lock:
                self._left_out.add(node_id)
            _LOG.error("node %d is left out: %s", node_id, farewell.reason)

    def _use_plain(self, node_id: int, reason: str) -> None:
        with self._lock:
            self._plain.add(node_id)
        _LOG.warning(
            "node %d is not on the stream: %s. It gets Flower's plain messages, about 6 s each",
            node_id,
            reason,
        )

    def give_up_lost(self, seconds: float) -> None:
        """Fail the messages of nodes whose connection broke so long ago."""
        for link in list(self._server.links.values()):
            lost_at = link.lost_at
            if lost_at is not None and time.monotonic() - lost_at > seconds:
                link.fail_pending("its connection broke and did not come back in time")
