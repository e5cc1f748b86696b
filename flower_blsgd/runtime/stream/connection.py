"""A node's connection to the stream: made, kept, and made again when it breaks."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc

from .channel_options import (
    CLIENT_OPTIONS,
    METHOD,
    NODE_KEY,
    SERVICE,
    SESSION_ENDED,
    TOKEN_KEY,
)
from .frames import Frame, FrameError, FrameReader, Kind, frame_pieces
from .invitation import Farewell, Invitation

_LOG = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_GIVE_UP_SECONDS = 20.0
_LONGEST_PAUSE_SECONDS = 1.0
_FLUSH_SECONDS = 0.1
_WATCHER_SECONDS = 0.5

Holding = Callable[[], tuple[list[str], list[bytes]]]


class ClientConnection:
    """Connects a node to the server, again and again until the session is over.

    Parameters
    ----------
    invitation : Invitation
        Where the server is, and what to show it.
    node_id : int
        Who connects.
    superlink : str
        ``HOST:PORT`` of the SuperLink as the node reaches it, if known: the server is likely to
        be found there too.
    take : callable
        Called with each message's frame.
    holding : callable
        Returns the ids of the messages that the node has, and its replies that may not have
        arrived, which are sent again on a new connection.
    """

    def __init__(
        self,
        invitation: Invitation,
        node_id: int,
        superlink: str,
        take: Callable[[Frame], None],
        holding: Holding,
    ) -> None:
        self.connected = False
        """Whether there ever was a connection."""
        self._invitation = invitation
        self._metadata = ((NODE_KEY, str(node_id)), (TOKEN_KEY, invitation.token))
        self._addresses = _candidates(invitation.addresses, superlink)
        self._take, self._holding = take, holding
        self._outgoing: queue.SimpleQueue[Sequence[bytes] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._call: grpc.Call | None = None

    def run(self) -> Farewell:
        """Stay connected until the session is over; return how it ended."""
        last_contact = time.monotonic()
        pause = 0.05
        reason = ""
        while not self._closed.is_set():
            patience = _GIVE_UP_SECONDS if self.connected else _CONNECT_SECONDS
            left = last_contact + patience - time.monotonic()
            if left <= 0:
                return Farewell(self.connected, reason)
            channel = self._reach(left)
            if channel is None:
                reason = f"it cannot reach {' or '.join(self._addresses)}"
                continue
            try:
                ended, reason = self._talk(channel)
            finally:
                _close_soon(channel)
            if ended:
                return Farewell(self.connected, reason)
            if self.connected:
                last_contact, pause = time.monotonic(), 0.05
            self._closed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return Farewell(self.connected)

    def send(self, pieces: Sequence[bytes]) -> None:
        """Send a frame on the connection that there is; on a new one, see `holding`."""
        self._outgoing.put(pieces)

    def close(self) -> None:
        """Say that the node ends, and hang up."""
        self._closed.set()
        self._outgoing.put(frame_pieces(Kind.BYE, {}))
        self._outgoing.put(None)
        call = self._call
        if call is not None:
            time.sleep(_FLUSH_SECONDS)
            call.cancel()

    def _reach(self, seconds: float) -> grpc.Channel | None:
        """Return a channel to the first address that answers and has the right certificate."""
        credentials = grpc.ssl_channel_credentials(self._invitation.certificate)
        channels = {
            address: grpc.secure_channel(address, credentials, CLIENT_OPTIONS)
            for address in self._addresses
        }
        ready: queue.SimpleQueue[str] = queue.SimpleQueue()
        watchers = {address: _when_ready(ready, address) for address in channels}
        for address, channel in channels.items():
            channel.subscribe(watchers[address], try_to_connect=True)
        try:
            first = ready.get(timeout=seconds)
        except queue.Empty:
            first = ""
        if first:
            self._addresses = (first,)  # the others may be somebody else's by now
        for address, channel in channels.items():
            channel.unsubscribe(watchers[address])
            if address != first:
                _close_soon(channel)
        return channels.get(first)

    def _talk(self, channel: grpc.Channel) -> tuple[bool, str]:
        """Use a channel until it breaks; return whether the session is over, and why."""
        outgoing: queue.SimpleQueue[Sequence[bytes] | None] = queue.SimpleQueue()
        # From here on replies go this way. One that went the old way in vain is in `holding`.
        self._outgoing = outgoing
        holding, replies = self._holding()
        outgoing.put(frame_pieces(Kind.HELLO, {"holding": holding}))
        outgoing.put(replies)
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{SERVICE}/{METHOD}"
        )
        call = method(_pieces_of(outgoing), metadata=self._metadata)
        self._call = call
        try:
            for frame in FrameReader().frames(call):
                if frame.kind is Kind.END:
                    return True, ""
                if frame.kind is Kind.WELCOME:
                    self.connected = True
                else:
                    self._take(frame)
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
            return True, "the server refused it: its invitation is not valid any more"
        _LOG.info("the stream to %s broke (%s)", self._addresses[0], code)
        return False, f"its connection broke ({code.name.lower() if code else 'unknown'})"


def _close_soon(channel: grpc.Channel) -> None:
    """Close a channel when gRPC's own thread, which watched it, has ended: it would raise."""
    timer = threading.Timer(_WATCHER_SECONDS, channel.close)
    timer.daemon = True
    timer.start()


def _when_ready(
    ready: "queue.SimpleQueue[str]", address: str
) -> Callable[[grpc.ChannelConnectivity], None]:
    def note(state: grpc.ChannelConnectivity) -> None:
        if state is grpc.ChannelConnectivity.READY:
            ready.put(address)

    return note


def _pieces_of(outgoing: "queue.SimpleQueue[Sequence[bytes] | None]") -> Iterator[bytes]:
    while (pieces := outgoing.get()) is not None:
        yield from pieces


def _candidates(addresses: Sequence[str], superlink: str) -> tuple[str, ...]:
    """Return the addresses to try; the server is likely to be where the SuperLink is."""
    host = superlink.rpartition(":")[0]
    port = addresses[0].rpartition(":")[2] if addresses else ""
    beside = [f"{host}:{port}"] if host and port else []
    return tuple(dict.fromkeys([*beside, *addresses]))
