"""The gRPC server in the ServerApp's process, and its link to each node."""

import hmac
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from flwr.app import Error, Message

from ..flower_internals import NODE_GONE
from ..mailbox import Mailbox
from .codec import EncodedMessage, decode_reply, message_chunks
from .frames import Frame, FrameError, Kind, frame_chunks, read_frames
from .security import (
    METHOD,
    NODE_KEY,
    SERVER_OPTIONS,
    SERVICE,
    SESSION_ENDED,
    TOKEN_KEY,
    listen,
    new_certificate,
    new_token,
)

_LOG = logging.getLogger(__name__)

_MOST_CONNECTIONS = 4096
_REFUSALS_LOGGED = 20
_LONGEST_ID = 20


class Connection:
    """One connection of a node: frames that go out, until it breaks.

    Attributes
    ----------
    outgoing : SimpleQueue
        Frames, each as its chunks; None closes the connection.
    ended : bool
        Whether the session is over: what is still queued need not be sent.
    """

    def __init__(self) -> None:
        self.outgoing: queue.SimpleQueue[Sequence[bytes] | None] = queue.SimpleQueue()
        self.ended = False

    def chunks(self) -> Iterator[bytes]:
        """Yield all that goes out, until it is closed or the session ends."""
        while (frame := self.outgoing.get()) is not None:
            for chunk in frame:
                if self.ended:
                    return
                yield chunk

    def close(self) -> None:
        """Send what is queued, and nothing more."""
        self.outgoing.put(None)

    def end(self) -> None:
        """Send nothing more: the session is over. Takes no lock."""
        self.ended = True
        self.close()


class Link:
    """Carries one node's messages over whichever connection it has.

    A message that was sent when the connection broke is sent again on the next one, unless the
    node says that it has it. If none comes in time, every message gets an error reply, so that
    nobody waits for it.

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
    was_connected : Event
        Set by the first connection.
    lost_at : float or None
        `time.monotonic` when the last connection broke; None while there is one, and before the
        first.
    """

    def __init__(self, node_id: int, token: bytes, mailbox: Mailbox) -> None:
        self.node_id, self.token = node_id, token
        self.was_connected = threading.Event()
        self.lost_at: float | None = None
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._pending: dict[str, EncodedMessage] = {}
        self._held: dict[str, int] = {}
        self._closed = ""
        self._ended = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None

    def submit(self, message: EncodedMessage) -> None:
        """Send a message, now or on the next connection; fail it if there will be none."""
        with self._lock:
            if not self._closed:
                if self._connection is not None:
                    awaited = [*self._pending, message.message_id]
                    self._connection.outgoing.put(message_chunks(message, self._held, awaited))
                self._pending[message.message_id] = message
                return
        self._fail(message, self._closed)

    def receive(self, connection: Connection, frame: Frame) -> None:
        """Take a frame that came on a connection.

        Raises
        ------
        FrameError
            If it is not one that a node may send.
        """
        if frame.kind is Kind.HELLO:
            self._attach(connection, frame)
        elif frame.kind is Kind.MESSAGE:
            self._deliver(frame)
        else:
            raise FrameError(f"a node does not send {frame.kind.name}")

    def detach(self, connection: Connection) -> None:
        """Note that a connection is over."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
                self.lost_at = time.monotonic()

    def close(self, reason: str) -> None:
        """Fail what is pending; what is submitted from now on fails at once."""
        with self._lock:
            self._closed = reason
            connection = self._connection
        self.fail_pending(reason)
        if connection is not None:
            connection.close()

    def fail_pending(self, reason: str) -> None:
        """Fail what is pending; the node may come back."""
        with self._lock:
            failed, self._pending = list(self._pending.values()), {}
        for message in failed:
            self._fail(message, reason)

    def end(self) -> None:
        """Tell the node that the session is over. Takes no lock: a signal's handler calls it."""
        self._ended = True  # first, for a connection that is being made now
        connection = self._connection
        if connection is not None:
            connection.end()

    def _attach(self, connection: Connection, frame: Frame) -> None:
        holding = frame.header.get("holding")
        if not isinstance(holding, list):
            raise FrameError("a node came without the list of what it has")
        with self._lock:
            if self._closed:
                connection.end()
                return
            previous, self._connection = self._connection, connection
            self._held = {}  # what was under way may not have arrived
            connection.outgoing.put(frame_chunks(Kind.WELCOME, {}))
            for message_id, message in self._pending.items():
                if message_id not in holding:
                    chunks = message_chunks(message, self._held, self._pending)
                    connection.outgoing.put(chunks)
            self.lost_at = None
        if self._ended:
            connection.end()
        if previous is not None:  # its break was not noticed
            previous.close()
        if self.was_connected.is_set():
            _LOG.info("node %d is connected again", self.node_id)
        self.was_connected.set()

    def _deliver(self, frame: Frame) -> None:
        message_id = str(frame.header.get("reply-to"))
        with self._lock:
            message = self._pending.get(message_id)
        if message is None:
            return  # it has failed already, or this is the second copy
        reply = decode_reply(frame, message)
        with self._lock:
            self._pending.pop(message_id, None)
        self._mailbox.receive(reply)

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
        self._mailbox = mailbox
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
        link = Link(node_id, new_token(), self._mailbox)
        previous = self.links.get(node_id)
        self.links[node_id] = link
        if previous is not None:
            previous.close("a new session began")
        return link

    def end(self) -> None:
        """Tell every node that it is over. Takes no lock: a signal's handler calls it."""
        for link in list(self.links.values()):
            link.end()

    def stop(self, grace_seconds: float) -> None:
        """Stop listening; what is under way is cut off after `grace_seconds`."""
        self._server.stop(grace_seconds).wait(grace_seconds + 1)

    def _session(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        link = self._authenticated(context)
        connection = Connection()
        if not context.add_callback(connection.close):
            return  # it is over already
        context.send_initial_metadata(())
        arguments = link, connection, messages, context
        threading.Thread(target=_read, args=arguments, daemon=True).start()
        yield from connection.chunks()
        if connection.ended:  # a status, since a frame may be half sent
            context.set_code(SESSION_ENDED)

    def _authenticated(self, context: grpc.ServicerContext) -> Link:
        """Return the link of the node that connects; anybody else is refused."""
        shown = dict(context.invocation_metadata())
        node_id, token = shown.get(NODE_KEY, ""), shown.get(TOKEN_KEY, b"")
        is_number = str(node_id).isdecimal() and len(node_id) <= _LONGEST_ID
        link = self.links.get(int(node_id)) if is_number else None
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


def _read(
    link: Link, connection: Connection, messages: Iterator[bytes], context: grpc.ServicerContext
) -> None:
    """Pass on what a node sends, until its connection ends."""
    try:
        for frame in read_frames(messages):
            try:
                link.receive(connection, frame)
            except FrameError:
                raise
            except Exception as error:  # nothing that a node sends is dropped silently
                raise FrameError(f"{type(error).__name__}: {error}") from error
    except FrameError as error:
        _LOG.error("the connection of node %d is closed: %s", link.node_id, error)
        # Else it would come back at once, and send the same again.
        link.close(f"what it sent cannot be read: {error}")
        context.cancel()
    except Exception:  # it broke: a bare Exception where that was in mid-read
        _LOG.debug("reading from node %d", link.node_id, exc_info=True)
    finally:
        link.detach(connection)
        connection.close()
