"""The gRPC server in the ServerApp's process, and its link to each node."""

import hmac
import logging
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from flwr.app import Error, Message

from ..flower_internals import NODE_GONE
from ..mailbox import Mailbox
from .codec import (
    Bytes,
    EncodedMessage,
    FrameError,
    acknowledgement_of,
    chunks_of,
    decode_reply,
    frame_of,
    read_frames,
)
from .security import (
    HOLDING_KEY,
    METHOD,
    NODE_KEY,
    SERVER_OPTIONS,
    SERVICE,
    SESSION_ENDED,
    TOKEN_KEY,
    WELCOME_KEY,
    listen,
    new_certificate,
    new_token,
)

_LOG = logging.getLogger(__name__)

_MOST_CONNECTIONS = 4096
_REFUSALS_LOGGED = 20
_MOST_UNREAD = 10_000
"""Frames that wait for a node to read them. A node that only sends is cut off."""


Outgoing = queue.SimpleQueue[list[bytes] | None]
"""What goes out on one connection: frames, each as its parts; None closes it."""


class Link:
    """Carries one node's messages over whichever connection it has, as long as its session lasts.

    A message waits for as long as somebody waits for its reply: it goes out on the next connection
    where there is none, and again where the last one broke, unless the node says that it has it.
    When the session is over every message gets an error reply.

    Parameters
    ----------
    node_id : int
        The node's.
    token : bytes
        What it must show.
    mailbox : Mailbox
        Takes every reply, error replies included.

    Attributes
    ----------
    was_connected : bool
        Whether there ever was a connection.
    over : str
        Why the session is over; empty while it lasts.
    """

    def __init__(self, node_id: int, token: bytes, mailbox: Mailbox) -> None:
        self.node_id, self.token = node_id, token
        self.was_connected = False
        self.over = ""
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._outgoing: Outgoing | None = None
        self._pending: dict[str, EncodedMessage] = {}
        self._held: dict[str, int] = {}

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._outgoing is not None and not self.over

    def submit(self, message: EncodedMessage) -> None:
        """Send a message, now or on the next connection; fail it if there will be none."""
        with self._lock:
            if not self.over:
                self._drop_unexpected()
                if self._outgoing is not None:
                    self._outgoing.put(frame_of(*message, self._held))
                self._pending[message.message.metadata.message_id] = message
                return
        self._fail(message, self.over)

    def attach(self, outgoing: Outgoing, holding: Sequence[str]) -> None:
        """Use a new connection; send again what is pending, but for what the node has already.

        Parameters
        ----------
        outgoing : SimpleQueue
            Of the new connection.
        holding : sequence of str
            The ids of messages that the node has.
        """
        with self._lock:
            again, self.was_connected = self.was_connected, True
            previous, self._outgoing = self._outgoing, outgoing
            self._held = {}  # what was under way may not have arrived
            self._drop_unexpected()
            self._mailbox.settle(self.node_id, holding)
            for message_id, message in self._pending.items():
                if message_id not in holding:
                    outgoing.put(frame_of(*message, self._held))
        if self.over:
            outgoing.put(None)
        if previous is not None:  # its break was not noticed
            previous.put(None)
        if again:
            _LOG.info("node %d is connected again", self.node_id)

    def _drop_unexpected(self) -> None:
        """Drop what nobody waits for any more, such as an order of an earlier round."""
        expects = self._mailbox.expects
        self._pending = {i: message for i, message in self._pending.items() if expects(i)}

    def chunks(self, outgoing: Outgoing) -> Iterator[bytes]:
        """Yield all that goes out on a connection, until it is closed or the session is over."""
        while (frame := outgoing.get()) is not None:
            for chunk in chunks_of(frame):
                if self.over:
                    return
                yield chunk

    def read(
        self, outgoing: Outgoing, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> None:
        """Take what the node sends on a connection, until that ends."""
        try:
            for reply, elements in read_frames(messages):
                self._receive(outgoing, reply, elements)
        except Exception as error:
            if context.is_active():  # else the connection broke
                _LOG.error("the connection of node %d is closed: %s", self.node_id, error)
                self.close(f"what it sent cannot be read: {error}")
        finally:
            with self._lock:
                if self._outgoing is outgoing:
                    self._outgoing = None
            outgoing.put(None)

    def _receive(self, outgoing: Outgoing, reply: Message, elements: Bytes) -> None:
        message_id = reply.metadata.reply_to_message_id
        if outgoing.qsize() > _MOST_UNREAD:
            raise FrameError("it sends and does not read")
        with self._lock:
            message = self._pending.get(message_id)
        if message is not None:  # else it has failed already, or this is the second copy
            answer = decode_reply(reply, elements, message.message)
            with self._lock:
                self._pending.pop(message_id, None)
            self._mailbox.receive(answer)
        elif self._mailbox.late.get(message_id) == self.node_id:  # not another node's
            self._mailbox.receive(reply)  # it is late no more
        outgoing.put(acknowledgement_of(reply))

    def close(self, reason: str) -> None:
        """End the session: fail what is pending, and at once what is submitted from now on."""
        self.end(reason)
        with self._lock:
            failed, self._pending = list(self._pending.values()), {}
        self._mailbox.settle(self.node_id)
        for message in failed:
            self._fail(message, reason)

    def end(self, reason: str = "the run is over") -> None:
        """Tell the node that the session is over. Takes no lock: a signal's handler calls it."""
        self.over = reason  # first, for a connection that is being made now
        outgoing = self._outgoing
        if outgoing is not None:
            outgoing.put(None)

    def _fail(self, message: EncodedMessage, reason: str) -> None:
        error = Error(NODE_GONE, f"node {self.node_id}: {reason}")
        self._mailbox.receive(Message(error, reply_to=message.message))


class StreamServer:
    """Accepts connections of the nodes that sessions were opened for, and of nobody else.

    Parameters
    ----------
    address : str
        ``HOST:PORT`` that nodes are to connect to; ``:PORT`` for any host; empty for any host
        and a free port.
    mailbox : Mailbox
        Takes the replies.

    Attributes
    ----------
    links : dict of int to Link
        The nodes with a session, and those that had one.
    port : int
        Where it listens.
    certificate : bytes
        What nodes know it by, as PEM.

    Raises
    ------
    UsageError
        If the address cannot be listened on.
    """

    def __init__(self, address: str, mailbox: Mailbox) -> None:
        self.links: dict[int, Link] = {}
        self.mailbox = mailbox
        self._refusals = 0
        self.certificate, credentials = new_certificate()
        self._server = grpc.server(
            ThreadPoolExecutor(_MOST_CONNECTIONS, thread_name_prefix="stream"),
            options=SERVER_OPTIONS,
        )
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._session
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        self._server.add_generic_rpc_handlers((handlers,))
        self.port = listen(self._server, address, credentials)
        self._server.start()

    def open_session(self, node_id: int) -> Link:
        """Let a node connect, with a new token; one that it had before becomes invalid."""
        link = Link(node_id, new_token(), self.mailbox)
        previous = self.links.get(node_id)
        self.links[node_id] = link
        if previous is not None:
            previous.close("a new session began")
        return link

    def end(self) -> None:
        """Tell every node that its session is over. Takes no lock: a signal's handler calls it."""
        for link in list(self.links.values()):
            link.end()

    def stop(self, grace_seconds: float) -> None:
        """Stop listening; what is under way is cut off after `grace_seconds`."""
        self._server.stop(grace_seconds).wait(grace_seconds + 1)

    def _session(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        shown = dict(context.invocation_metadata())
        link = self._authenticated(shown, context)
        outgoing: Outgoing = queue.SimpleQueue()
        if not context.add_callback(lambda: outgoing.put(None)):
            return  # it is over already
        link.attach(outgoing, str(shown.get(HOLDING_KEY, "")).split(","))
        # First, since it also detaches: what follows raises if the call is cancelled by now.
        threading.Thread(target=link.read, args=(outgoing, messages, context), daemon=True).start()
        context.send_initial_metadata(((WELCOME_KEY, ""),))
        yield from link.chunks(outgoing)
        if link.over:  # a status, since a frame may be half sent
            context.set_code(SESSION_ENDED)

    def _authenticated(
        self, shown: Mapping[str, str | bytes], context: grpc.ServicerContext
    ) -> Link:
        """Return the link of the node that connects; anybody else is refused."""
        link = {str(n): link for n, link in list(self.links.items())}.get(str(shown.get(NODE_KEY)))
        token = shown.get(TOKEN_KEY)
        # Also for an unknown node, so that the time that it takes does not tell which are known.
        expected = link.token if link is not None else new_token()
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
