"""A node's end of the stream, on the server: what it was sent, and what it still owes."""

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence

from flwr.app import Error, Message

from ..flower_internals import NODE_GONE
from ..mailbox import Mailbox
from .frames import Frame, FrameError, Kind, frame_pieces
from .letters import Letter, letter_pieces, reply_in

_LOG = logging.getLogger(__name__)


class Connection:
    """One connection of a node: frames that go out, until it breaks.

    Attributes
    ----------
    outgoing : SimpleQueue
        Pieces of frames, each frame's as one list; None ends it.
    ended : bool
        Whether the session is over: what is still queued need not be sent.
    """

    def __init__(self) -> None:
        self.outgoing: queue.SimpleQueue[Sequence[bytes] | None] = queue.SimpleQueue()
        self.ended = False

    def pieces(self) -> Iterator[bytes]:
        """Yield all that goes out, until it is closed or the session ends."""
        while (frame := self.outgoing.get()) is not None:
            for piece in frame:
                if self.ended:
                    return
                yield piece

    def close(self) -> None:
        """Send what is queued, and nothing more."""
        self.outgoing.put(None)

    def end(self) -> None:
        """Send nothing more: the session is over. Takes no lock."""
        self.ended = True
        self.close()


class Link:
    """Keeps a node's messages going over whatever connection there is.

    A message that was sent when the connection broke is sent again on the next one, unless the
    node says that it has it. If none comes in time, every message gets an error reply, so that
    nobody waits for it.

    Parameters
    ----------
    node_id : int
        Which node.
    token : bytes
        What it must show.
    mailbox : Mailbox
        Takes every reply, error replies included.

    Attributes
    ----------
    lost_at : float or None
        `time.monotonic` when the last connection broke; None while there is one, and before the
        first.
    label : str
        How logs call the node.
    """

    def __init__(self, node_id: int, token: bytes, mailbox: Mailbox) -> None:
        self.node_id, self.token = node_id, token
        self.label = f"node {node_id}"
        self.lost_at: float | None = None
        self.greeted = threading.Event()
        """Whether there ever was a connection."""
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._pending: dict[str, Letter] = {}
        self._held: dict[str, int] = {}
        self._gone = ""
        self._ended = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None

    def submit(self, letter: Letter) -> None:
        """Send a message, now or on the next connection; fail it if there will be none."""
        with self._lock:
            if not self._gone:
                if self._connection is not None:
                    awaited = [*self._pending, letter.message_id]
                    pieces = letter_pieces(letter, self._held, awaited)
                    self._connection.outgoing.put(pieces)
                self._pending[letter.message_id] = letter
                return
        self._fail([letter], self._gone)

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
        elif frame.kind is Kind.BYE:
            self.give_up("it ended its session")
        else:
            raise FrameError(f"a node does not send {frame.kind.name}")

    def detach(self, connection: Connection) -> None:
        """Note that a connection is over."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
                self.lost_at = time.monotonic()

    def give_up(self, reason: str) -> None:
        """Fail what is pending; what is submitted from now on fails at once."""
        with self._lock:
            self._gone = f"{self.label}: {reason}"
            failed, self._pending = list(self._pending.values()), {}
            connection = self._connection
        self._fail(failed, self._gone)
        if connection is not None:
            connection.close()

    def fail_pending(self, reason: str) -> None:
        """Fail what is pending; the node may come back."""
        with self._lock:
            failed, self._pending = list(self._pending.values()), {}
        self._fail(failed, f"{self.label}: {reason}")

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
            if self._gone:
                connection.outgoing.put(frame_pieces(Kind.END, {}))
                connection.close()
                return
            previous, self._connection = self._connection, connection
            self._held = {}  # what was under way may not have come
            connection.outgoing.put(frame_pieces(Kind.WELCOME, {}))
            for message_id, letter in self._pending.items():
                if message_id not in holding:
                    pieces = letter_pieces(letter, self._held, self._pending)
                    connection.outgoing.put(pieces)
            self.lost_at = None
        if self._ended:
            connection.end()
        if previous is not None:  # we had not noticed that it broke
            previous.close()
        if self.greeted.is_set():
            _LOG.info("%s is connected again", self.label)
        self.greeted.set()

    def _deliver(self, frame: Frame) -> None:
        message_id = str(frame.header.get("reply-to"))
        with self._lock:
            letter = self._pending.get(message_id)
        if letter is None:
            return  # it was given up, or this is the second copy
        reply = reply_in(frame, letter)
        with self._lock:
            self._pending.pop(message_id, None)
        self._mailbox.receive(reply)

    def _fail(self, letters: Sequence[Letter], reason: str) -> None:
        for letter in letters:
            self._mailbox.receive(Message(Error(NODE_GONE, reason), reply_to=letter.message))
