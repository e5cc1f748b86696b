"""A node's side of the stream: it connects, calls the app for each message, and replies."""

import contextlib
import ctypes
import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from ..app_call import handler_of, takes_views
from ..flower_internals import (
    RAISED,
    answer_beside_mods,
    inside_lifespan,
    release_records_at_once,
)
from .codec import (
    SESSION_MESSAGE,
    SessionRequest,
    SessionResult,
    decode_message,
    reply_chunks,
)
from .frames import Frame, FrameError, Kind, frame_chunks, read_frames
from .model_changes import HeldModels
from .security import CLIENT_OPTIONS, METHOD, NODE_KEY, SERVICE, SESSION_ENDED, TOKEN_KEY

_LOG = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_GIVE_UP_SECONDS = 20.0
_SHORTEST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_WATCHER_SECONDS = 0.5

_WAIT_SECONDS = 0.5
"""No wait of a handler is longer: Flower ends a node with a signal that only runs in between."""

_IDLE_SECONDS = 0.05
_UNWIND_SECONDS = 0.4
_PARENT_SECONDS = 0.2
_SUPERNODE = b"flower-supernode"


def serve_sessions(app: ClientApp) -> ClientApp:
    """Let a ClientApp take its messages over a stream, where the ServerApp opens one.

    Its functions stay as they are: each message on the stream calls the app as Flower would,
    mods included, and ``context.state`` lives on; a lifespan is entered once, around all of
    them. The calls come from one thread, which is not the main one. Where the session ends while
    the app works, what it does is interrupted by an exception that is no ``Exception``.

    Parameters
    ----------
    app : ClientApp
        With ``@app.train()`` and its like; it is changed in place.

    Returns
    -------
    ClientApp
        The same app.

    Raises
    ------
    ValueError
        If the app was made with ``client_fn``.

    Examples
    --------
    ::

        app = ClientApp()
        flower_blsgd.serve_sessions(app)
    """

    def serve(message: Message, context: Context) -> Message:
        release_records_at_once()
        return Session(app, message, context).serve().to_reply(message)

    answer_beside_mods(app, SESSION_MESSAGE, serve)
    return app


# --- what lives as long as a session ------------------------------------------------------------

_callbacks: list[Callable[[], object]] = []
_serving = threading.Event()


def in_session() -> bool:
    """Whether this process serves a session: what it keeps lives on from message to message."""
    return _serving.is_set()


def at_session_end(callback: Callable[[], object]) -> None:
    """Call this once when the session that this process serves ends; the last given comes first.

    A ClientApp that keeps something for the whole session, such as processes of its own, ends it
    so. What a callback raises is dropped.
    """
    _callbacks.append(callback)


def begin_session() -> None:
    """Note that this process serves a session from now on, until `end_session`."""
    _serving.set()


def end_session() -> None:
    """Call all callbacks of `at_session_end`, once."""
    _serving.clear()
    while _callbacks:
        with contextlib.suppress(Exception):
            _callbacks.pop()()


def die_with_supernode() -> None:
    """End this process at once when its parent, or the SuperNode above that, is gone.

    Flower asks a ClientApp's process to end when its SuperNode is gone, with a signal that waits
    for the code under way. A new SuperNode may be there by then, and its device held twice.
    """
    parent = os.getppid()
    above = _parent_of(parent)
    supernode = above if above and _SUPERNODE in _command_of(above) else 0

    def watch() -> None:
        while os.getppid() == parent and (not supernode or _parent_of(parent) == supernode):
            time.sleep(_PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="supernode-watch", daemon=True).start()


def _parent_of(process_id: int) -> int:
    """Return the parent's process id; 0 if it is not known."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _command_of(process_id: int) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return b""


# --- the session --------------------------------------------------------------------------------


class SessionOverError(BaseException):
    """Raised in the app's code when its session ends while it works."""


class Session:
    """Serves one session, from the message that opens it to its end.

    Parameters
    ----------
    app : ClientApp
        What answers the messages.
    request : Message
        The message that opened the session.
    context : Context
        The node's.
    """

    def __init__(self, app: ClientApp, request: Message, context: Context) -> None:
        self._opened_by = request
        self._node_id = context.node_id
        self._superlink = str(context.node_config.get("superlink", ""))
        self._handle = handler_of(inside_lifespan(app), context)
        self._views = takes_views(app)
        self._held = HeldModels("float32", self._views)
        self._over = threading.Event()
        self._result = SessionResult(connected=False, reason="no answer")
        self._work: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._replies: dict[str, list[bytes]] = {}
        """By the message that was received; empty while there is none."""
        self._worker = threading.Thread(target=self._serve_work, name="client-app", daemon=True)

    def serve(self) -> SessionResult:
        """Serve until the server ends the session, or is gone for good."""
        try:
            request = SessionRequest.from_message(self._opened_by)
        except FrameError as error:
            return SessionResult(connected=False, reason=str(error))
        self._held = HeldModels(request.wire_dtype, self._views)
        die_with_supernode()
        begin_session()
        self._connection = ClientConnection(
            request, self._node_id, self._superlink, self._receive, self._holding
        )
        network = threading.Thread(target=self._keep_connected, name="stream", daemon=True)
        self._worker.start()
        network.start()
        try:
            while not self._over.wait(_WAIT_SECONDS):
                pass
        finally:  # also when Flower ends the node: SystemExit
            self._connection.close()
            self._interrupt_work()
            end_session()
        return self._result

    def _keep_connected(self) -> None:
        try:
            self._result = self._connection.run()
        except Exception as error:
            _LOG.exception("the stream broke")
            reason = f"{type(error).__name__}: {error}"
            self._result = SessionResult(self._connection.connected, reason)
        finally:
            self._over.set()

    def _holding(self) -> tuple[list[str], list[bytes]]:
        """Return the ids of messages that need not be sent again, and the replies that must."""
        replies = dict(self._replies)
        return list(replies), [chunk for reply in replies.values() for chunk in reply]

    def _receive(self, frame: Frame) -> None:
        if frame.kind is not Kind.MESSAGE:
            raise FrameError(f"a server does not send {frame.kind.name} here")
        message = decode_message(frame, self._opened_by, self._node_id, self._held)
        awaited = frame.header.get("awaited")
        for answered in set(self._replies).difference(awaited if isinstance(awaited, list) else ()):
            del self._replies[answered]
        message_id = message.metadata.message_id
        if message_id not in self._replies:
            self._replies[message_id] = []
            self._work.put(message)

    def _serve_work(self) -> None:
        try:
            while (message := self._work.get()) is not None:
                message_id = message.metadata.message_id
                chunks = self._answer(message)
                del message
                if message_id in self._replies:  # else nobody waits for it any more
                    self._replies[message_id] = chunks
                    self._connection.send(chunks)
        except SessionOverError:
            pass

    def _answer(self, message: Message) -> list[bytes]:
        try:
            return reply_chunks(self._handle(message), self._held)
        except SessionOverError:
            raise
        except BaseException:  # such as SystemExit: the server would wait for ever
            error = Error(RAISED, traceback.format_exc())
            return reply_chunks(Message(error, reply_to=message), self._held)

    def _interrupt_work(self) -> None:
        """Stop the app's code where it is; if it does not stop, the process ends around it."""
        self._work.put(None)
        self._worker.join(_IDLE_SECONDS)
        if self._worker.is_alive() and self._worker.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._worker.ident), ctypes.py_object(SessionOverError)
            )
            self._worker.join(_UNWIND_SECONDS)


# --- the connection -----------------------------------------------------------------------------


class ClientConnection:
    """Connects a node to the server, again and again until the session is over.

    Parameters
    ----------
    request : SessionRequest
        Where the server is, and what to show it.
    node_id : int
        The node's.
    superlink : str
        ``HOST:PORT`` of the SuperLink as the node reaches it, if known: the server is likely to
        be found on the same host.
    receive : callable
        Called with each message's frame.
    holding : callable
        Returns the ids of the messages that the node has, and its replies that may not have
        arrived, which are sent again on a new connection.
    """

    def __init__(
        self,
        request: SessionRequest,
        node_id: int,
        superlink: str,
        receive: Callable[[Frame], None],
        holding: Callable[[], tuple[list[str], list[bytes]]],
    ) -> None:
        self.connected = False
        """Whether there ever was a connection."""
        self._certificate = request.certificate
        self._metadata = ((NODE_KEY, str(node_id)), (TOKEN_KEY, request.token))
        host = superlink.rpartition(":")[0]
        ports = [address.rpartition(":")[2] for address in request.addresses[:1] if host]
        candidates = [*(f"{host}:{port}" for port in ports), *request.addresses]
        self._addresses = tuple(dict.fromkeys(candidates))
        self._receive, self._holding = receive, holding
        self._outgoing: queue.SimpleQueue[Sequence[bytes] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._call: grpc.Call | None = None

    def run(self) -> SessionResult:
        """Stay connected until the session is over; return how it ended."""
        last_contact = time.monotonic()
        pause = _SHORTEST_PAUSE_SECONDS
        reason = ""
        while not self._closed.is_set():
            patience = _GIVE_UP_SECONDS if self.connected else _CONNECT_SECONDS
            left = last_contact + patience - time.monotonic()
            if left <= 0:
                return SessionResult(self.connected, reason)
            channel = self._connect(left)
            if channel is None:
                reason = f"it cannot reach {' or '.join(self._addresses)}"
                continue
            try:
                ended, reason = self._talk(channel)
            finally:
                _close_soon(channel)
            if ended:
                return SessionResult(self.connected, reason)
            if self.connected:
                last_contact, pause = time.monotonic(), _SHORTEST_PAUSE_SECONDS
            self._closed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return SessionResult(self.connected)

    def send(self, chunks: Sequence[bytes]) -> None:
        """Send a frame on the current connection; what it loses is in `holding`."""
        self._outgoing.put(chunks)

    def close(self) -> None:
        """Hang up."""
        self._closed.set()
        self._outgoing.put(None)
        call = self._call
        if call is not None:
            call.cancel()

    def _connect(self, seconds: float) -> grpc.Channel | None:
        """Return a channel to the first address that answers and has the right certificate."""
        credentials = grpc.ssl_channel_credentials(self._certificate)
        ready: queue.SimpleQueue[str] = queue.SimpleQueue()
        attempts = {}
        for address in self._addresses:
            channel = grpc.secure_channel(address, credentials, CLIENT_OPTIONS)
            future = grpc.channel_ready_future(channel)
            future.add_done_callback(_announce(ready, address))
            attempts[address] = channel, future
        try:
            first = ready.get(timeout=seconds)
        except queue.Empty:
            first = ""
        if first:
            self._addresses = (first,)  # the others may be somebody else's by now
        for address, (channel, future) in attempts.items():
            if address != first:
                future.cancel()
                _close_soon(channel)
        return attempts[first][0] if first else None

    def _talk(self, channel: grpc.Channel) -> tuple[bool, str]:
        """Use a channel until it breaks; return whether the session is over, and why."""
        outgoing: queue.SimpleQueue[Sequence[bytes] | None] = queue.SimpleQueue()
        # From here on replies go this way. One that the old way lost is in `holding`.
        self._outgoing = outgoing
        holding, replies = self._holding()
        outgoing.put(frame_chunks(Kind.HELLO, {"holding": holding}))
        outgoing.put(replies)
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{SERVICE}/{METHOD}"
        )
        call = method(_chunks_of(outgoing), metadata=self._metadata)
        self._call = call
        try:
            for frame in read_frames(call):
                if frame.kind is Kind.WELCOME:
                    self.connected = True
                else:
                    self._receive(frame)
        except FrameError as error:
            return True, f"it cannot understand the server: {error}"
        except grpc.RpcError:
            pass  # its code is read below
        finally:
            outgoing.put(None)
            call.cancel()
        code = call.code()
        if code is SESSION_ENDED:
            return True, ""
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return True, "the server refused it: its token is not valid any more"
        _LOG.info("the stream to %s broke (%s)", self._addresses[0], code)
        return False, f"its connection broke ({code.name.lower() if code else 'unknown'})"


def _announce(ready: "queue.SimpleQueue[str]", address: str) -> Callable[[object], None]:
    """Return a callback that puts an address into a queue."""
    return lambda _: ready.put(address)


def _close_soon(channel: grpc.Channel) -> None:
    """Close a channel when gRPC's own thread, which watched it, has ended: it would raise."""
    timer = threading.Timer(_WATCHER_SECONDS, channel.close)
    timer.daemon = True
    timer.start()


def _chunks_of(outgoing: "queue.SimpleQueue[Sequence[bytes] | None]") -> Iterator[bytes]:
    while (chunks := outgoing.get()) is not None:
        yield from chunks
