"""The gRPC server in the process of the ServerApp, and its link to each node."""

import hmac
import logging
import queue
import resource
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from flwr.app import Error, Message

from ...flower.internals import NODE_GONE
from ..mailbox import Mailbox
from .codec import (
    EncodedMessage,
    acknowledgement_of,
    chunks_of,
    decode_reply,
    frame_of,
    read_frames,
)
from .encoded_arrays import FrameArrays, FrameError
from .security import (
    HOLDING_KEY,
    METHOD,
    NODE_KEY,
    SERVER_OPTIONS,
    SERVICE,
    STREAM_ENDED,
    TOKEN_KEY,
    WELCOME_KEY,
    listen,
    new_certificate,
)

_LOG = logging.getLogger(__name__)

_MOST_CONNECTIONS = 4096
_REFUSALS_LOGGED = 20
_TOKEN_BYTES = 32
_MOST_UNREAD = 10_000
"""Limit of frames that a node has not read. A node that only sends is disconnected."""

Outgoing = queue.SimpleQueue[list[bytes] | None]
"""Frames to send on one connection, each as its parts; None closes the connection."""


class Link:
    """The link to one node for the time of its stream, across connections.

    A message is kept as long as its reply is expected. Without a connection it is sent on the next
    one. After a broken connection it is sent again, unless the node reports that it has it. When
    the stream ends, every message gets an error reply.
    """

    def __init__(self, node_id: int, token: bytes, mailbox: Mailbox) -> None:
        self.node_id = node_id
        self.token = token
        self.was_connected = False
        """Whether there ever was a connection."""
        self.over = ""
        """Reason why the stream ended; empty while it lasts."""
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._outgoing: Outgoing | None = None
        self._pending: dict[str, EncodedMessage] = {}
        self._held: dict[str, int] = {}

    @property
    def connected(self) -> bool:
        """Whether the node is connected now."""
        return self._outgoing is not None and not self.over

    def submit(self, message: EncodedMessage) -> None:
        """Send a message now or on the next connection; fail it if the stream is over."""
        with self._lock:
            if not self.over:
                self._drop_unexpected()
                if self._outgoing is not None:
                    self._outgoing.put(frame_of(*message, self._held))
                self._pending[message.message.metadata.message_id] = message
                return
        self._fail(message, self.over)

    def attach(self, outgoing: Outgoing, holding: Sequence[str]) -> None:
        """Use a new connection, and send the pending messages whose ids are not in `holding`."""
        with self._lock:
            again = self.was_connected
            self.was_connected = True
            previous = self._outgoing
            self._outgoing = outgoing
            self._held = {}  # frames under way may not have arrived
            self._drop_unexpected()
            self._mailbox.settle(self.node_id, holding)
            for message_id, message in self._pending.items():
                if message_id not in holding:
                    outgoing.put(frame_of(*message, self._held))
        if self.over:
            outgoing.put(None)
        if previous is not None:  # it broke unnoticed
            previous.put(None)
        if again:
            _LOG.info("node %d is connected again", self.node_id)

    def _drop_unexpected(self) -> None:
        """Drop messages whose replies are no longer expected, such as old orders."""
        expects = self._mailbox.expects
        self._pending = {i: message for i, message in self._pending.items() if expects(i)}

    def chunks(self, outgoing: Outgoing) -> Iterator[bytes]:
        """Yield the data to send on a connection, until it is closed or the stream is over."""
        while (frame := outgoing.get()) is not None:
            for chunk in chunks_of(frame):
                if self.over:
                    return
                yield chunk

    def read(
        self, outgoing: Outgoing, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> None:
        """Receive the replies of the node on a connection until it ends."""
        try:
            for reply, arrays in read_frames(messages):
                self._receive(outgoing, reply, arrays)
        except Exception as error:
            if context.is_active():  # otherwise the connection broke
                _LOG.error("the connection of node %d is closed: %s", self.node_id, error)
                self.close(f"its data cannot be read: {error}")
        finally:
            with self._lock:
                if self._outgoing is outgoing:
                    self._outgoing = None
            outgoing.put(None)

    def _receive(self, outgoing: Outgoing, reply: Message, arrays: FrameArrays) -> None:
        message_id = reply.metadata.reply_to_message_id
        if outgoing.qsize() > _MOST_UNREAD:
            raise FrameError("it sends data but does not read")
        with self._lock:
            message = self._pending.get(message_id)
        if message is not None:  # otherwise it failed already, or this is a second copy
            answer = decode_reply(reply, arrays, message.message)
            with self._lock:
                self._pending.pop(message_id, None)
            self._mailbox.receive(answer)
        elif self._mailbox.late.get(message_id) == self.node_id:  # not that of another node
            self._mailbox.receive(reply)  # no longer late
        outgoing.put(acknowledgement_of(reply))

    def close(self, reason: str) -> None:
        """End the stream: fail pending and later messages."""
        self.end(reason)
        with self._lock:
            failed = list(self._pending.values())
            self._pending = {}
        self._mailbox.settle(self.node_id)
        for message in failed:
            self._fail(message, reason)

    def end(self, reason: str = "the run is over") -> None:
        """Tell the node that the stream is over. Takes no lock, since signal handlers call it."""
        self.over = reason  # first, for a connection that is just being made
        outgoing = self._outgoing
        if outgoing is not None:
            outgoing.put(None)

    def _fail(self, message: EncodedMessage, reason: str) -> None:
        error = Error(NODE_GONE, f"node {self.node_id}: {reason}")
        self._mailbox.receive(Message(error, reply_to=message.message))


def _most_connections() -> int:
    """Return the limit of connections, which leaves files for checkpoints and results."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = limit == resource.RLIM_INFINITY
    return _MOST_CONNECTIONS if unlimited else min(_MOST_CONNECTIONS, limit // 2)


class StreamServer:
    """gRPC server that accepts only the nodes of open streams.

    It listens on ``HOST:PORT``, on any host with ``:PORT``, or on a free port with an empty
    address; UsageError if it cannot. Its certificate is PEM.
    """

    def __init__(self, address: str, mailbox: Mailbox) -> None:
        self.links: dict[int, Link] = {}
        """Links to the nodes with a current or earlier stream, by node id."""
        self.mailbox = mailbox
        self._refusals = 0
        self.certificate, credentials = new_certificate()
        self._server = grpc.server(
            ThreadPoolExecutor(_MOST_CONNECTIONS, thread_name_prefix="stream"),
            options=[
                *SERVER_OPTIONS,
                ("grpc.max_allowed_incoming_connections", _most_connections()),
            ],
        )
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._session
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        self._server.add_generic_rpc_handlers((handlers,))
        self.port = listen(self._server, address, credentials)
        self._server.start()

    def open_link(self, node_id: int) -> Link:
        """Let a node connect with a new token, and invalidate its previous token."""
        link = Link(node_id, secrets.token_bytes(_TOKEN_BYTES), self.mailbox)
        previous = self.links.get(node_id)
        self.links[node_id] = link
        if previous is not None:
            previous.close("a new session began")
        return link

    def end(self) -> None:
        """Tell all nodes that the streams are over, without a lock; see `Link.end`."""
        for link in list(self.links.values()):
            link.end()

    def stop(self, grace_seconds: float) -> None:
        """Stop listening, and cancel calls after `grace_seconds`."""
        self._server.stop(grace_seconds).wait(grace_seconds + 1)

    def _session(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        shown = dict(context.invocation_metadata())
        link = self._authenticated(shown, context)
        outgoing: Outgoing = queue.SimpleQueue()
        if not context.add_callback(lambda: outgoing.put(None)):
            return  # the call is over already
        link.attach(outgoing, str(shown.get(HOLDING_KEY, "")).split(","))
        # First, since it also detaches: the next line raises if the call was cancelled.
        threading.Thread(target=link.read, args=(outgoing, messages, context), daemon=True).start()
        context.send_initial_metadata(((WELCOME_KEY, ""),))
        yield from link.chunks(outgoing)
        if link.over:  # as a status, since a frame may be half sent
            context.set_code(STREAM_ENDED)

    def _authenticated(
        self, shown: Mapping[str, str | bytes], context: grpc.ServicerContext
    ) -> Link:
        """Return the link of the connecting node; refuse other callers."""
        link = {str(n): link for n, link in list(self.links.items())}.get(str(shown.get(NODE_KEY)))
        token = shown.get(TOKEN_KEY)
        # Also for unknown nodes, so that the duration does not reveal which nodes are known.
        expected = link.token if link is not None else secrets.token_bytes(_TOKEN_BYTES)
        valid = isinstance(token, bytes) and hmac.compare_digest(token, expected)
        if link is not None and valid:
            return link
        self._refusals += 1
        if self._refusals <= _REFUSALS_LOGGED:
            _LOG.warning(
                "refused a connection to the stream from %s: it has no token of a node of this run",
                context.peer(),
            )
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token of this run")
        raise AssertionError("abort raises")
