"""Messages between our own processes: small things pickled, arrays in shared memory.

Each process makes blocks of shared memory for what it sends. In the pipe goes, instead of a
record's arrays, the number of the block that they lie in. With every message an end says which of
the other end's blocks it still refers to: a block is used again when neither end does. Ends take
turns, so nothing is ever on its way while that is said.

Both ends are processes of one run, on one machine, started by one another; nothing is unpickled
that came from anywhere else.
"""

import contextlib
import copyreg
import functools
import io
import itertools
import mmap
import os
import pickle
import select
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, TypeGuard

import numpy as np
from flwr.app import ArrayRecord

from ..array_records import (
    ALIGNMENT,
    AnyArray,
    ArrayView,
    Layout,
    NewMemory,
    PrivateArray,
    flat_of,
    flat_record,
    memory_of,
)
from .memory import require_bytes

_INLINE_BYTES = 4096
"""Records smaller than this are pickled: a block would be a page and an open file at least."""

_SPARE_BYTES = 1 << 20
"""A free block may be this much larger than needed, or twice as large."""

_numbers = itertools.count(1)


class BlockMemory(np.ndarray[Any, Any]):
    """All bytes of a block, in use for as long as this array or any view on it lives.

    numpy keeps the owner of a view's memory alive: it goes from array to array, past those of the
    view's own class, and stops here because this class is another and owns a map, not an array.
    """

    block: "Block"
    """Whose bytes they are."""


class Block:
    """A piece of shared memory, mapped.

    The kernel frees it when the last process that has it is gone, however it ended: it has no
    name that could be left behind.

    Parameters
    ----------
    number : int
        Its name between two processes.
    fd : int
        A file descriptor of the memory; taken over.
    size : int
        Bytes.
    copy_on_write : bool (default: False)
        What is written here stays here.
    """

    def __init__(self, number: int, fd: int, size: int, copy_on_write: bool = False) -> None:
        self.number, self.fd, self.size = number, fd, size
        weakref.finalize(self, os.close, fd)
        mode = mmap.MAP_PRIVATE if copy_on_write else mmap.MAP_SHARED
        self._map = mmap.mmap(fd, size, mode)
        self.address = address_of(np.frombuffer(self._map, np.uint8))
        self._memory: weakref.ref[BlockMemory] | None = None
        self.layout: Layout | None = None
        """What it was last used for: there are zeros between these arrays."""
        self.peers: set[object] = set()
        """The channels whose other end may refer to it."""
        self.given_up = False
        """Whether its pool uses it no more: the other ends should unmap it."""

    @property
    def referred_to(self) -> bool:
        """Whether anything in this process refers to its memory."""
        return self._memory is not None and self._memory() is not None

    @property
    def in_use(self) -> bool:
        """Whether anybody, here or there, may still look at it."""
        return bool(self.peers) or self.referred_to

    def memory(self) -> BlockMemory:
        """Return all of its bytes; the same array as long as anything refers to it."""
        memory = self._memory() if self._memory is not None else None
        if memory is None:
            # On the map itself: of an array on another array numpy would keep that one only.
            memory = BlockMemory((self.size,), np.uint8, buffer=self._map)
            memory.block = self
            self._memory = weakref.ref(memory)
        return memory

    def holds(self, array: AnyArray) -> bool:
        """Return whether an array's elements are in this block."""
        return self.address <= address_of(array) <= self.address + self.size - array.nbytes

    def copy_on_write(self) -> "Block":
        """Return the same memory, mapped once more: what is written there stays there."""
        return Block(self.number, os.dup(self.fd), self.size, copy_on_write=True)


def address_of(array: AnyArray) -> int:
    """Return where an array's elements begin."""
    address: int = array.__array_interface__["data"][0]
    return address


class BufferPool:
    """The blocks that this process makes for what it sends; safe between threads.

    Parameters
    ----------
    purpose : str (default: "sharing arrays between processes")
        What they are for, for the refusal when memory is short.
    """

    def __init__(self, purpose: str = "sharing arrays between processes") -> None:
        self._purpose = purpose
        self._blocks: dict[int, Block] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all its blocks."""
        return sum(block.size for block in list(self._blocks.values()))

    def new_memory(self, layout: Layout) -> BlockMemory:
        """Return memory for a record of this layout, with zeros between its arrays.

        Raises
        ------
        UsageError
            If there is not enough free memory.
        """
        with self._lock:
            block = self._free_block(max(layout.num_bytes, 1))
            memory = block.memory()
        if block.layout is not layout:
            for end in layout.ends:
                memory[max(0, end - ALIGNMENT) : end] = 0
            block.layout = layout
        return memory

    def owns(self, memory: AnyArray) -> TypeGuard[BlockMemory]:
        """Return whether this memory is a block of this pool."""
        return (
            isinstance(memory, BlockMemory)
            and self._blocks.get(memory.block.number) is memory.block
        )

    def found(self, layout: Layout, arrays: Sequence[AnyArray]) -> BlockMemory | None:
        """Return the block of this pool that these arrays lie in, each at its place."""
        block = next((b for b in list(self._blocks.values()) if b.holds(arrays[0])), None)
        if block is None or block.layout != layout:
            return None
        addresses = [block.address + offset for *_, offset in layout.places]
        return block.memory() if [address_of(array) for array in arrays] == addresses else None

    def _free_block(self, size: int) -> Block:
        free = [block for block in self._blocks.values() if not block.in_use]
        largest = max(2 * size, size + _SPARE_BYTES)
        fitting = [block for block in free if size <= block.size <= largest]
        if fitting:
            return min(fitting, key=lambda block: block.size)
        for block in free:  # of a model that is sent no more
            self._blocks.pop(block.number).given_up = True
        require_bytes(size, self._purpose)
        block = Block(next(_numbers), _anonymous_file(size), size)
        self._blocks[block.number] = block
        return block


def _anonymous_file(size: int) -> int:
    if sys.platform == "linux":
        fd = os.memfd_create("blsgd")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


# --- what is sent -----------------------------------------------------------------------------


@dataclass
class Payload:
    """An object, ready to be sent.

    Parameters
    ----------
    content : bytes
        The pickled object.
    memories : list of BlockMemory
        What its arrays lie in; none of it changes while the payload lives.
    """

    content: bytes
    memories: list[BlockMemory] = field(default_factory=list)

    @property
    def blocks(self) -> dict[int, Block]:
        """The blocks that the receiver must have, by number."""
        return {memory.block.number: memory.block for memory in self.memories}


class Packer:
    """Packs objects that belong together; a record that several of them share is placed once.

    Parameters
    ----------
    pool : BufferPool
        Where arrays are put.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        # With the records, so that no other gets the id of one of them.
        self._placed: dict[int, tuple[ArrayRecord, _Placed | None]] = {}

    def pack(self, content: object) -> Payload:
        """Return an object, ready to be sent.

        Raises
        ------
        UsageError
            If there is not enough memory.
        Exception
            Whatever pickling raises.
        """
        memories: dict[int, BlockMemory] = {}
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)

        def reduce(record: ArrayRecord) -> Any:
            if id(record) not in self._placed:
                self._placed[id(record)] = record, _place(record, self._pool, _INLINE_BYTES)
            _, placed = self._placed[id(record)]
            if placed is None:
                return record.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            layout, memory = placed
            memories[memory.block.number] = memory
            return _record_at, (memory.block.number, _pickled(layout))

        # By a table of types, not by `persistent_id`, which is asked of every text and number.
        pickler.dispatch_table = {**copyreg.dispatch_table, ArrayRecord: reduce}
        pickler.dump(content)
        return Payload(buffer.getvalue(), list(memories.values()))


@functools.lru_cache(maxsize=256)
def _pickled(layout: Layout) -> bytes:
    return pickle.dumps(layout.kinds)


@functools.lru_cache(maxsize=256)
def _unpickled(kinds: bytes) -> Layout:
    return Layout.of(pickle.loads(kinds))


_Placed = tuple[Layout, BlockMemory]


def _place(record: ArrayRecord, pool: BufferPool, min_bytes: int = 1) -> _Placed | None:
    """Return where in a pool a record's arrays lie; they are copied there unless they do already.

    None if not all of them are plain numbers, or there are fewer bytes.
    """
    flat = flat_of(record)
    if flat is None:
        return _place_arrays(record, pool, min_bytes)
    if flat.layout.num_bytes < min_bytes:
        return None
    if pool.owns(flat.memory):
        return flat.layout, flat.memory
    if not isinstance(flat.memory, BlockMemory):
        flat.new_memory = pool.new_memory  # where `flat_like` makes more of its kind
    memory = pool.new_memory(flat.layout)
    memory[: flat.layout.num_bytes] = flat.bytes
    return flat.layout, memory


def _place_arrays(record: ArrayRecord, pool: BufferPool, min_bytes: int) -> _Placed | None:
    arrays = [memory_of(array) for array in record.values()]
    plain = [array for array in arrays if array is not None]
    pairs = zip(record.items(), plain, strict=False)
    layout = Layout.of((name, array.dtype, elements.shape) for (name, array), elements in pairs)
    if len(plain) < len(arrays) or layout.num_bytes < min_bytes:
        return None
    memory = pool.found(layout, plain)
    if memory is None:
        memory = pool.new_memory(layout)
        for (_, _, dtype, shape, offset), elements in zip(layout.places, plain, strict=True):
            np.ndarray(shape, dtype, memory, offset)[...] = elements
    return layout, memory


def share_views(record: ArrayRecord, pool: BufferPool) -> ArrayRecord | None:
    """Return a record of views with its arrays in shared memory; None if they are no views.

    Views that lie there already, in the layout of a record, stay where they are. Private arrays
    stay private.
    """
    kinds = {type(array) for array in record.values()}
    if kinds not in ({ArrayView}, {PrivateArray}):
        return None
    placed = _place(record, pool)
    if placed is None:
        return None
    kind = PrivateArray if PrivateArray in kinds else ArrayView
    return flat_record(*placed, pool.new_memory, kind)


# --- what is received -------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedTensor:
    """Where a tensor, or an array, of a shipped object is: see `local_grid.ship`."""

    number: int
    dtype: str
    shape: tuple[int, ...]
    is_torch: bool


def _record_at(
    blocks: Mapping[int, Block],
    views: bool,
    new_memory: NewMemory | None,
    number: int,
    kinds: bytes,
) -> ArrayRecord:
    """Return the record in a block; a payload names the last two arguments."""
    memory = blocks[number].memory()
    # A private array is a copy each time that it is asked for, and not before.
    memory.flags.writeable = views
    kind = ArrayView if views else PrivateArray
    return flat_record(_unpickled(kinds), memory, new_memory, kind)


def unpack(
    content: bytes,
    blocks: Mapping[int, Block],
    views: bool,
    new_memory: NewMemory | None = None,
) -> Any:
    """Return the object of a payload.

    Parameters
    ----------
    content : bytes
        Of the payload.
    blocks : mapping of int to Block
        The sender's blocks by number, mapped here.
    views : bool
        Whether `numpy` of an array is its shared memory, or a copy of it.
    new_memory : callable, optional
        Where a reply to it is best put, see `flat_like`.
    """
    return _Unpickler(io.BytesIO(content), blocks, views, new_memory).load()


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        buffer: io.BytesIO,
        blocks: Mapping[int, Block],
        views: bool,
        new_memory: NewMemory | None,
    ) -> None:
        super().__init__(buffer)
        self._blocks, self._where = blocks, (blocks, views, new_memory)
        self._tensors: dict[SharedTensor, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what a payload names."""
        found = super().find_class(module, name)
        # No method: the unpickler remembers it, and would keep itself and the records alive.
        return functools.partial(found, *self._where) if found is _record_at else found

    def persistent_load(self, place: SharedTensor) -> Any:
        """Return the shipped tensor at this place; what was one tensor stays one."""
        if place not in self._tensors:
            memory = self._blocks[place.number].copy_on_write().memory()
            array: AnyArray = np.ndarray(place.shape, place.dtype, buffer=memory)
            if place.is_torch:
                import torch

                self._tensors[place] = torch.from_numpy(array)
            else:
                self._tensors[place] = array
        return self._tensors[place]


# --- the pipe ---------------------------------------------------------------------------------


class Channel:
    """One end of the pipe between a server and a worker process.

    The ends take turns, but for what the server sends before its first message.

    Parameters
    ----------
    end : socket.socket
        Of a pair; taken over.
    views : bool (default: True)
        Whether `numpy` of an array that arrives is its shared memory, or a copy of it.
    new_memory : callable, optional
        Where this end puts records that are to be sent, see `flat_like`.
    """

    def __init__(
        self, end: socket.socket, views: bool = True, new_memory: NewMemory | None = None
    ) -> None:
        self._connection = Connection(end.detach())
        self._poller = select.poll()  # Connection.poll makes a new one each time
        self._poller.register(self._connection, select.POLLIN)
        self.views = views
        self._new_memory = new_memory
        self._sent: dict[int, Block] = {}
        self._attached: dict[int, Block] = {}

    @property
    def attached_bytes(self) -> int:
        """Bytes of the other end's blocks that are mapped here."""
        return sum(block.size for block in list(self._attached.values()))

    def send(self, payload: Payload) -> None:
        """Send an object.

        Raises
        ------
        OSError
            If it cannot be sent. The way is broken then: `receive` fails on both ends.
        """
        blocks = payload.blocks
        new = [block for number, block in blocks.items() if number not in self._sent]
        given_up = [number for number, block in self._sent.items() if block.given_up]
        referred_to = {number for number, block in self._attached.items() if block.referred_to}
        for block in blocks.values():  # first: `close` must find it also if sending fails
            self._sent[block.number] = block
            block.peers.add(self)
        sizes = [(block.number, block.size) for block in new]
        envelope = (payload.content, sizes, given_up, referred_to)
        try:
            self._connection.send_bytes(pickle.dumps(envelope, pickle.HIGHEST_PROTOCOL))
            for block in new:
                send_handle(self._connection, block.fd, None)
        except OSError:
            self.shut_down()
            raise
        for number in given_up:
            del self._sent[number]

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
            content = self._receive()
        except (EOFError, OSError):
            raise
        except Exception as error:  # half an envelope was read: nothing that follows makes sense
            raise OSError(f"the pipe is out of step: {type(error).__name__}: {error}") from error
        return unpack(content, self._attached, self.views, self._new_memory)

    def _receive(self) -> bytes:
        envelope = pickle.loads(self._connection.recv_bytes())
        content: bytes = envelope[0]
        new, given_up, referred_to = envelope[1:]
        for number, block in self._sent.items():
            if number not in referred_to:
                block.peers.discard(self)
        for number in given_up:
            self._attached.pop(number, None)
        for number, size in new:
            self._attached[number] = Block(number, recv_handle(self._connection), size)
        return content

    def poll(self, seconds: float = 0.0) -> bool:
        """Wait until something can be received, at most so long; return whether it can."""
        return bool(self._poller.poll(1000 * seconds))

    def shut_down(self) -> None:
        """Break the way off, so that both ends notice."""
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._connection.fileno())) as end,
        ):
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; what the other end referred to no longer keeps our blocks in use."""
        self._connection.close()
        for block in self._sent.values():
            block.peers.discard(self)
