"""One end of the pipe between a grid and a worker process: objects, and the memory they need."""

import collections
import pickle
import select
import socket
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from ..flat_record import NewMemory
from .shared_arrays import Parcel, unpack
from .shared_block import Block


class Channel:
    """Sends parcels and receives objects, one exchange at a time.

    With every parcel goes what the other end must know of shared memory: new blocks, which of
    its own blocks are looked at no more, and which of ours are gone for good. A block is used
    again only when neither end has a view on it.

    Parameters
    ----------
    end : socket.socket
        Of a pair; taken over.
    views : bool
        Whether `numpy` of an array that arrives is its shared memory, or a copy of it.
    new_memory : callable, optional
        Where this end puts records that are to be sent, see `flat_like`.
    """

    def __init__(
        self, end: socket.socket, views: bool, new_memory: NewMemory | None = None
    ) -> None:
        self._connection = Connection(end.detach())
        self.fileno = self._connection.fileno()
        self._poller = select.poll()  # Connection.poll makes a new one each time
        self._poller.register(self._connection, select.POLLIN)
        self.views = views
        self._new_memory = new_memory
        self._sent: dict[int, Block] = {}
        self._attached: dict[int, Block] = {}
        self._unused: collections.deque[int] = collections.deque()
        self._num_sent = self._num_received = 0
        self._last_sent: dict[int, int] = {}
        """The last parcel that refers to a block, by its number."""

    @property
    def attached_bytes(self) -> int:
        """Bytes of the other end's blocks that are mapped here."""
        return sum(block.size for block in list(self._attached.values()))

    def send(self, parcel: Parcel) -> None:
        """Send a parcel.

        Raises
        ------
        OSError
            If the other end is gone.
        """
        new = [block for number, block in parcel.blocks.items() if number not in self._sent]
        gone = [number for number, block in self._sent.items() if block.retired]
        unused = self._no_longer_in_use()
        for block in parcel.blocks.values():
            # First: `close` must find it also if sending fails.
            self._sent[block.number] = block
            block.holders.add(self)
        self._num_sent += 1
        self._last_sent |= dict.fromkeys(parcel.blocks, self._num_sent)
        sizes = [(block.number, block.size) for block in new]
        envelope = (parcel.payload, sizes, unused, gone, self._num_received)
        self._connection.send_bytes(pickle.dumps(envelope, pickle.HIGHEST_PROTOCOL))
        for block in new:
            send_handle(self._connection, block.fd, None)
        for number in gone:
            del self._sent[number], self._last_sent[number]

    def receive(self) -> Any:
        """Wait for an object and return it.

        Raises
        ------
        EOFError, OSError
            If the other end is gone, or what it sent cannot be taken in: it must be closed then.
        Exception
            Whatever unpickling an object raises; the next one can be received.
        """
        try:
            payload = self._received()
        except (EOFError, OSError):
            raise
        except Exception as error:  # half an envelope was read: nothing that follows makes sense
            raise OSError(f"the pipe is out of step: {type(error).__name__}: {error}") from error
        return unpack(payload, self._attached, self.views, self._new_memory)

    def _received(self) -> bytes:
        envelope = pickle.loads(self._connection.recv_bytes())
        payload: bytes = envelope[0]
        new, unused, gone, they_received = envelope[1:]
        self._num_received += 1
        for number in unused:
            # Not if a parcel that refers to it is still on its way: its end is told as well.
            if number in self._sent and self._last_sent[number] <= they_received:
                self._sent[number].release(self)
        for number in gone:
            self._attached.pop(number, None)
        for number, size in new:
            fd = recv_handle(self._connection)
            self._attached[number] = Block(number, fd, size, on_unused=self._unused.append)
        return payload

    def _no_longer_in_use(self) -> list[int]:
        ended = {self._unused.popleft() for _ in range(len(self._unused))}
        # One that has come again since is looked at again; its end will be told then.
        return [
            number
            for number in ended
            if number in self._attached and not self._attached[number].in_use
        ]

    def poll(self, seconds: float = 0.0) -> bool:
        """Wait until something can be received, at most so long; return whether it can."""
        return bool(self._poller.poll(1000 * seconds))

    def close(self) -> None:
        """Close this end; the other end's views no longer keep our blocks from being used."""
        self._connection.close()
        for block in self._sent.values():
            block.release(self)
