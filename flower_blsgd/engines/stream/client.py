"""The node's side of a stream: connect, call the app for each message, and reply."""

import ctypes
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ...flower.app_call import (
    PROCESS_ENDS,
    do_deferred_work,
    error_of,
    handler_of,
    main_program_of,
    takes_views,
)
from ...flower.array_records import ArrayView, PrivateArray
from ...flower.internals import inside_lifespan, release_records_at_once
from ...processes import end_with, restore_in_forks
from .codec import chunks_of, encode_reply, read_frames
from .dialer import Dialer
from .encoded_arrays import FrameArrays, FrameError, Tensors, decode_arrays
from .request import StreamRequest, StreamResult, serving_stream
from .security import (
    HOLDING_KEY,
    METHOD,
    NODE_KEY,
    SERVICE,
    STREAM_ENDED,
    TOKEN_KEY,
    WELCOME_KEY,
)

_LOG = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
"""Time to connect. A node that fails gets plain messages."""

_REFUSED_SECONDS = 60.0
_AWAY_SECONDS = 300.0
"""Time until a stream without a server ends: if connections are refused, as after the server was
killed, or if the server is unreachable. Until then the node takes no other run. The stream ends
immediately if another program listens there, such as the next run on a fixed port."""

_ATTEMPT_SECONDS = 5.0
_SHORTEST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 3.0

_WAIT_SECONDS = 0.5
"""Longest wait of a handler: Flower ends a node with a signal, which is handled between waits."""

_PROGRAM_SECONDS = 5.0
"""Time for a program to end after the stream, and for its last reply to arrive."""

_IDLE_SECONDS = 0.05
_UNWIND_SECONDS = 0.4

_SUPERNODE = "flower-supernode"

_MOST_HELD = 100
"""Limit of message ids in a call's metadata. Other messages are sent again, and ignored."""


def serve_stream(app: ClientApp, message: Message, context: Context) -> Message:
    """Serve a stream, and return the answer to the message that opened it."""
    release_records_at_once()
    try:
        request = StreamRequest.from_message(message)
    except ValueError as error:
        return StreamResult(connected=False, reason=str(error)).to_reply(message)
    return NodeStream(app, request, context).serve().to_reply(message)


class StreamOverError(BaseException):
    """Raised in the app's code when the stream ends during a call."""


class NodeStream:
    """One stream: a connection to the server, and a call of the app for each message.

    A reply is kept until the server acknowledges it, and is sent again on the next connection. The
    key ``superlink`` of the node config may be the SuperLink as the node reaches it, ``HOST:PORT``:
    the server is likely on the same host.
    """

    def __init__(self, app: ClientApp, request: StreamRequest, context: Context) -> None:
        self._request = request
        self._handle = handler_of(inside_lifespan(app), context)
        self._program = main_program_of(app, context)
        self._context = context
        self._array_type = ArrayView if takes_views(app) else PrivateArray
        host = str(context.node_config.get("superlink", "")).rpartition(":")[0]
        ports = [address.rpartition(":")[2] for address in request.addresses[:1] if host]
        candidates = [*(f"{host}:{port}" for port in ports), *request.addresses]
        self._dialer = Dialer(list(dict.fromkeys(candidates)), request.certificate)
        # The last models received, which changes are relative to.
        self._held: dict[str, Tensors] = {}
        self._carried: dict[str, Tensors] = {}  # rounding errors of the last replies
        self._work: queue.SimpleQueue[tuple[Message, dict[str, Tensors]] | None]
        self._work = queue.SimpleQueue()
        self._replies: dict[str, list[bytes]] = {}  # by message id; empty during the call
        self._outgoing: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._call: grpc.Call | None = None
        self._connected = False
        self._over = threading.Event()
        self._result = StreamResult(connected=False, reason="no answer")

    def serve(self) -> StreamResult:
        """Serve until the server ends the stream or stays unreachable."""
        end_with_supernode()
        keep_flowers_signals_from_children()
        with serving_stream():
            worker = threading.Thread(target=self._serve_work, name="client-app", daemon=True)
            worker.start()
            threading.Thread(target=self._stay_connected, name="stream", daemon=True).start()
            try:
                if self._program is not None:
                    self._run_program(self._program)
                while not self._over.wait(_WAIT_SECONDS):
                    pass
            finally:  # also when Flower ends the node: SystemExit
                self.close()
                self._interrupt(worker)
        return self._result

    def _run_program(self, program: Callable[[Context], None]) -> None:
        """Run the app's program in this thread; end the stream if it raises.

        If the stream ends before the program, end the process.
        """

        def end_with_stream() -> None:
            self._over.wait()
            if not has_ended.wait(_PROGRAM_SECONDS):
                os._exit(1)

        has_ended = threading.Event()
        threading.Thread(target=end_with_stream, name="program-watch", daemon=True).start()
        try:
            program(self._context)
        except BaseException:  # also SystemExit of a script
            self._give_up("its program raised an exception")
        has_ended.set()

    def _give_up(self, reason: str) -> None:
        """End the stream when the server has all replies; the server opens another stream."""
        until = time.monotonic() + _PROGRAM_SECONDS
        while self._replies and time.monotonic() < until:
            if self._over.wait(_IDLE_SECONDS):
                break
        self._result = StreamResult(self._connected, reason)
        self._over.set()

    def close(self) -> None:
        """End the stream and close the connection."""
        self._over.set()
        if self._call is not None:
            self._call.cancel()

    # --- the app ---

    def _serve_work(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                message_id = work[0].metadata.message_id
                frame, process_ends = self._answer(*work)
                del work  # and its arrays
                self._replies[message_id] = frame
                self._outgoing.put(frame)
                if process_ends:
                    self._give_up("its process has to end")
                    return
                do_deferred_work()
        except StreamOverError:
            pass

    def _answer(self, message: Message, received: dict[str, Tensors]) -> tuple[list[bytes], bool]:
        """Return the reply as a frame, and whether this process has to end after it."""
        wire_dtype = self._request.wire_dtype
        try:
            reply = self._handle(message)
            ends = reply.has_error() and reply.error.code == PROCESS_ENDS
            return encode_reply(reply, received, self._carried, wire_dtype), ends
        except StreamOverError:
            raise
        except BaseException as error:  # such as SystemExit; the server waits for a reply
            failure = Message(error_of(error), reply_to=message)
            return encode_reply(failure, {}, {}, wire_dtype), False

    def _interrupt(self, worker: threading.Thread) -> None:
        """Interrupt the app's code. If it does not stop, the process ends anyway."""
        self._work.put(None)
        worker.join(_IDLE_SECONDS)
        if worker.is_alive() and worker.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(worker.ident), ctypes.py_object(StreamOverError)
            )
            worker.join(_UNWIND_SECONDS)

    # --- the connection ---

    def _stay_connected(self) -> None:
        try:
            result = self.connect()
        except Exception as error:
            _LOG.exception("the stream broke")
            result = StreamResult(self._connected, f"{type(error).__name__}: {error}")
        if not self._over.is_set():  # else it was this process that ended the stream
            self._result = result
        self._over.set()

    def connect(self) -> StreamResult:
        """Stay connected until the stream is over, and return how it ended.

        FrameError if data from the server cannot be read.
        """
        reason = f"it cannot reach {' or '.join(self._dialer.addresses)}"
        last_contact = not_refused = time.monotonic()
        pause = _SHORTEST_PAUSE_SECONDS
        while not self._over.is_set():
            with self._dialer.channel(min(_ATTEMPT_SECONDS, _CONNECT_SECONDS)) as channel:
                if channel is not None:
                    not_refused = time.monotonic()
                    was_connected, code = self._talk(channel)
                    if code is STREAM_ENDED:
                        return StreamResult(self._connected)
                    if code is grpc.StatusCode.UNAUTHENTICATED:
                        reason = "the server refused it: its token is no longer valid"
                        break
                    if was_connected:
                        last_contact = not_refused = time.monotonic()
                        pause = _SHORTEST_PAUSE_SECONDS
                        reason = f"its connection broke ({code.name.lower()})"
                        _LOG.info("the stream broke (%s)", code.name.lower())
                else:
                    found = self._dialer.listener(_ATTEMPT_SECONDS)
                    if found == "another":
                        reason = "another program listens where the server did"
                        break
                    if found != "nobody":
                        not_refused = time.monotonic()
            now = time.monotonic()
            patience = _AWAY_SECONDS if self._connected else _CONNECT_SECONDS
            if now - last_contact > patience or now - not_refused > _REFUSED_SECONDS:
                break
            self._over.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return StreamResult(self._connected, reason)

    def _talk(self, channel: grpc.Channel) -> tuple[bool, grpc.StatusCode]:
        """Use a connection until it breaks; return whether it was accepted, and its status."""
        outgoing: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        # From here on replies use this queue. Replies lost on the old connection are kept.
        self._outgoing = outgoing
        replies = dict(self._replies)
        for frame in replies.values():
            outgoing.put(frame)
        metadata = (
            (NODE_KEY, str(self._context.node_id)),
            (TOKEN_KEY, self._request.token),
            (HOLDING_KEY, ",".join(list(replies)[:_MOST_HELD])),
        )
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{SERVICE}/{METHOD}"
        )
        call = method(_chunks(outgoing), metadata=metadata)
        self._call = call
        if self._over.is_set():
            call.cancel()
        welcome = WELCOME_KEY in dict(call.initial_metadata())
        self._connected |= welcome
        try:
            for message, arrays in read_frames(call):
                self._receive(message, arrays)
        except grpc.RpcError:
            pass  # the code is returned
        finally:
            outgoing.put(None)
            call.cancel()
        return welcome, call.code()

    def _receive(self, message: Message, arrays: FrameArrays) -> None:
        answered = message.metadata.reply_to_message_id
        if answered:  # the server acknowledges this reply
            self._replies.pop(answered, None)
            return
        held = self._held
        models = decode_arrays(message, arrays, lambda n: held.get(n, {}), self._array_type)
        if self._request.wire_dtype == "float32":
            models = {}  # no changes are relative to them
        held.update(models)
        message_id = message.metadata.message_id
        if not message_id:
            raise FrameError("a message came without an id")
        if message_id not in self._replies:
            self._replies[message_id] = []
            self._work.put((message, models))


def _chunks(outgoing: "queue.SimpleQueue[list[bytes] | None]") -> Iterator[bytes]:
    while (frame := outgoing.get()) is not None:
        yield from chunks_of(frame)


# --- the end of a node's process ----------------------------------------------------------------


def end_with_supernode() -> None:
    """End this process as soon as its parent, or the SuperNode above the parent, ends.

    Flower ends a ClientApp's process with a signal that waits for running code. By then, a new
    SuperNode may use the same device.
    """
    parent = os.getppid()
    above = int((_read(parent, "stat").rpartition(")")[2].split() or "00")[1])
    is_supernode = _SUPERNODE in _read(above, "cmdline")
    end_with([parent, above] if is_supernode else [parent], lambda: os._exit(1))


def _read(process_id: int, name: str) -> str:
    try:
        return Path(f"/proc/{process_id}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def keep_flowers_signals_from_children() -> None:
    """Give forks of this process, such as those of a Pool, the usual handlers of signals.

    With Flower's, a child that is terminated would report that the ClientApp has failed.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    module = getattr(signal.getsignal(signal.SIGTERM), "__module__", None) or ""
    if module.startswith("flwr."):
        restore_in_forks(usual)
