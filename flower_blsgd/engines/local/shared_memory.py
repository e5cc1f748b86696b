"""Messages between our own processes: pickles in a pipe, and arrays in shared memory.

Each process allocates blocks of shared memory for the arrays that it sends. The pipe carries the
number of the block instead of the arrays. With every message, an end lists the other end's blocks
that it still refers to. A block is reused when neither end refers to it. The ends take turns, so no
message is under way while the list is made.

Both ends are processes of one run on one machine, one started by the other. Nothing else is
unpickled.
"""

import copyreg
import io
import itertools
import mmap
import os
import pickle
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, TypeGuard

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ...devices.machine import require_bytes
from ...flower.array_records import (
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
from ...flower.internals import reduced

_INLINE_BYTES = 4096
"""Smaller records are pickled: a block needs at least a page and an open file."""

_SPARE_BYTES = 1 << 20
"""A free block is reused if it is at most this much, or twice, larger than needed."""

_numbers = itertools.count(1)


class BlockMemory(np.ndarray[Any, Any]):
    """All bytes of a block, which is in use as long as this array or any view on it exists.

    The base of a numpy view is the first array in the chain of bases that has another class or owns
    its memory. So every view keeps this array alive.
    """

    block: "Block"
    """The block of these bytes."""


class Block:
    """A mapped piece of shared memory.

    It has no name in the file system, so the kernel frees it with the last process that uses it.
    Two processes identify it by its number. It closes its file descriptor. With `copy_on_write`,
    writes stay private.
    """

    def __init__(self, number: int, fd: int, copy_on_write: bool = False) -> None:
        self.number = number
        self.fd = fd
        self.size = os.fstat(fd).st_size
        weakref.finalize(self, os.close, fd)
        mode = mmap.MAP_PRIVATE if copy_on_write else mmap.MAP_SHARED
        self._map = mmap.mmap(fd, self.size, mode)
        self._memory: weakref.ref[BlockMemory] | None = None
        self.layout: Layout | None = None
        """Layout of the last record: there are zeros between its arrays."""
        self.peers: set[object] = set()
        """Channels whose other end may refer to this block."""
        self.given_up = False
        """Whether the pool has dropped this block, so that the other ends should unmap it."""

    @property
    def referred_to(self) -> bool:
        """Whether this process refers to its memory."""
        return self._memory is not None and self._memory() is not None

    @property
    def in_use(self) -> bool:
        """Whether this process or another end may still read the block."""
        # In this order: a thread that sends adds the peer before it drops its reference.
        return self.referred_to or bool(self.peers)

    def memory(self) -> BlockMemory:
        """Return all bytes of the block; the same array as long as it is referred to."""
        memory = self._memory() if self._memory is not None else None
        if memory is None:
            # Directly on the map, so that this array is the base of all views.
            memory = BlockMemory((self.size,), np.uint8, buffer=self._map)
            memory.block = self
            self._memory = weakref.ref(memory)
        return memory

    def copy_on_write(self) -> "Block":
        """Return a second mapping of the memory, whose writes stay private."""
        return Block(self.number, os.dup(self.fd), copy_on_write=True)


class BufferPool:
    """Thread-safe pool of the blocks that this process sends.

    The error when memory is short names the `purpose`.
    """

    def __init__(self, purpose: str = "sharing arrays between processes") -> None:
        self._purpose = purpose
        self._blocks: dict[int, Block] = {}
        self._lock = threading.Lock()

    def new_memory(self, layout: Layout) -> BlockMemory:
        """Return memory for a record, with zeros between its arrays.

        UsageError if there is not enough free memory.
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

    def _free_block(self, size: int) -> Block:
        free = [block for block in self._blocks.values() if not block.in_use]
        largest = max(2 * size, size + _SPARE_BYTES)
        fitting = [block for block in free if size <= block.size <= largest]
        if fitting:
            return min(fitting, key=lambda block: block.size)
        for block in free:  # of models that are no longer sent
            self._blocks.pop(block.number).given_up = True
        require_bytes(size, self._purpose)
        block = Block(next(_numbers), _anonymous_file(size))
        self._blocks[block.number] = block
        return block


def _anonymous_file(size: int) -> int:
    if sys.platform == "linux":
        fd = os.memfd_create("blsgd")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


# --- sending ----------------------------------------------------------------------------------


@dataclass
class Payload:
    """A pickled object and the blocks that it refers to, by number.

    The blocks do not change while the payload exists.
    """

    content: bytes
    memories: dict[int, BlockMemory]


_Placed = tuple[Layout, BlockMemory]

PlacedRecords = dict[int, tuple[ArrayRecord, _Placed | None]]
"""The record, which keeps its id in use, and the position of its arrays, by id of the record."""


def pack(content: object, pool: BufferPool, placed: PlacedRecords | None = None) -> Payload:
    """Pack an object, with the arrays of its records in a pool.

    `placed` has the records of objects that were packed before, so that a record in several
    objects is placed only once. These records must not change meanwhile.

    UsageError if there is not enough memory; any exception of pickling.
    """
    known = {} if placed is None else placed
    memories: dict[int, BlockMemory] = {}
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)

    def placed_record(record: ArrayRecord) -> Any:
        if id(record) not in known:
            known[id(record)] = record, _place(record, pool)
        _, where = known[id(record)]
        if where is None:
            return record.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        layout, memory = where
        memories[memory.block.number] = memory
        return _record_at, (memory.block.number, _pickled(layout))

    # A table of types is faster than `persistent_id`, which is called for every object.
    table: dict[type, Any] = dict.fromkeys((RecordDict, ConfigRecord, MetricRecord), reduced)
    pickler.dispatch_table = {**copyreg.dispatch_table, **table, ArrayRecord: placed_record}
    pickler.dump(content)
    return Payload(buffer.getvalue(), memories)


@lru_cache(maxsize=256)
def _pickled(layout: Layout) -> bytes:
    return pickle.dumps(layout.kinds)


@lru_cache(maxsize=256)
def _unpickled(kinds: bytes) -> Layout:
    return Layout.of(pickle.loads(kinds))


def _place(record: ArrayRecord, pool: BufferPool) -> _Placed | None:
    """Return the position of a record's arrays in a pool, after copying them there if needed.

    None if not all of them are plain numbers, or they are too small for a block.
    """
    flat = flat_of(record)
    if flat is None:
        return _place_arrays(record, pool)
    if flat.layout.num_bytes < _INLINE_BYTES:
        return None
    if pool.owns(flat.memory):
        return flat.layout, flat.memory
    if not isinstance(flat.memory, BlockMemory):
        flat.new_memory = pool.new_memory  # `flat_like` then allocates in the pool
    memory = pool.new_memory(flat.layout)
    memory[: flat.layout.num_bytes] = flat.bytes
    return flat.layout, memory


def _place_arrays(record: ArrayRecord, pool: BufferPool) -> _Placed | None:
    arrays = [memory_of(array) for array in record.values()]
    plain = [array for array in arrays if array is not None]
    pairs = zip(record.items(), plain, strict=False)
    layout = Layout.of((name, array.dtype, elements.shape) for (name, array), elements in pairs)
    if len(plain) < len(arrays) or layout.num_bytes < _INLINE_BYTES:
        return None
    return layout, filled(pool.new_memory(layout), layout, plain)


def filled(memory: BlockMemory, layout: Layout, arrays: Iterable[AnyArray]) -> BlockMemory:
    """Copy arrays into the memory of their layout, and return it."""
    for view, elements in zip(layout.views(memory), arrays, strict=True):
        view[...] = elements
    return memory


# --- the pipe ---------------------------------------------------------------------------------


class Channel:
    """One end of the pipe between a server and a worker process.

    The ends take turns, except before the server's first message. The channel closes the duplex
    pipe. `new_memory` allocates the memory of replies, see `flat_like`.
    """

    def __init__(self, connection: Connection, new_memory: NewMemory | None = None) -> None:
        self._connection = connection
        self.views = True
        """Whether `numpy` of a received array returns the shared memory or a copy."""
        self.new_memory = new_memory
        self._sent: dict[int, Block] = {}
        self.attached: dict[int, Block] = {}
        """Blocks of the other end that are mapped here, by number."""

    def send(self, payload: Payload) -> None:
        """Send an object.

        OSError if that fails. Then `receive` fails on both ends.
        """
        blocks = {number: memory.block for number, memory in payload.memories.items()}
        new = [block for number, block in blocks.items() if number not in self._sent]
        given_up = [number for number, block in self._sent.items() if block.given_up]
        referred_to = {number for number, block in self.attached.items() if block.referred_to}
        self._sent |= blocks  # first, so that `close` releases them if sending fails
        for block in blocks.values():
            block.peers.add(self)
        numbers = [block.number for block in new]
        envelope = (payload.content, numbers, given_up, referred_to)
        try:
            self._connection.send_bytes(pickle.dumps(envelope, pickle.HIGHEST_PROTOCOL))
            for block in new:
                send_handle(self._connection, block.fd, None)
        except OSError:
            self._connection.close()  # both ends notice this
            raise
        for number in given_up:
            del self._sent[number]

    def receive(self) -> Any:
        """Wait for an object and return it.

        EOFError or OSError if the other end has gone or the pipe cannot be read; then the channel
        must be closed. After any other exception of unpickling, the next object can be received.
        """
        try:
            envelope = pickle.loads(self._connection.recv_bytes())
            content, new, given_up, referred_to = envelope
            for number, block in self._sent.items():
                if number not in referred_to:
                    block.peers.discard(self)
            for number in given_up:
                self.attached.pop(number, None)
            for number in new:
                self.attached[number] = Block(number, recv_handle(self._connection))
        except (EOFError, OSError):
            raise
        except Exception as error:  # after half an envelope the pipe cannot be read further
            raise OSError(f"the pipe is out of step: {type(error).__name__}: {error}") from error
        return _Unpickler(content, self).load()

    def fileno(self) -> int:
        """Return the pipe's file descriptor."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end; blocks that the other end referred to are free again."""
        self._connection.close()
        for block in self._sent.values():
            block.peers.discard(self)


# --- receiving --------------------------------------------------------------------------------


def _record_at(channel: Channel, number: int, kinds: bytes) -> ArrayRecord:
    """Return the record in a block of the other end."""
    memory = channel.attached[number].memory()
    views = channel.views
    # A private array copies on each access, not before.
    memory.flags.writeable = views
    kind = ArrayView if views else PrivateArray
    return flat_record(_unpickled(kinds), memory, channel.new_memory, kind)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, channel: Channel) -> None:
        super().__init__(io.BytesIO(content))
        self._channel = channel

    def find_class(self, module: str, name: str) -> Any:
        """Return the named global; the function that finds a record gets the channel."""
        found = super().find_class(module, name)
        # Not a bound method: the unpickler would keep itself and the records alive.
        return partial(found, self._channel) if found is _record_at else found
