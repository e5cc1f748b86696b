"""Blocks of memory that two processes see, and a pool that uses them again."""

import itertools
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .memory import require_bytes

AnyArray = npt.NDArray[Any]

_numbers = itertools.count(1)

_ALIGNMENT = 64
"""Bytes: a cache line, and what vector instructions like."""

_SPARE_BYTES = 1 << 20
"""A free block may be this much larger than needed, or twice as large."""


class Lease(np.ndarray[Any, Any]):
    """The whole of a block, in use for as long as this array or any view on it lives.

    numpy keeps the owner of a view's memory alive: it goes from array to array, past those of the
    view's own class, and stops here because this class is another and owns a map, not an array.
    """


class Block:
    """A piece of shared memory, mapped.

    The kernel frees it when the last process that has it is gone, however it ended: it has no
    name that could be left behind.

    Parameters
    ----------
    number : int
        Its name between two processes.
    fd : int
        A file descriptor of the memory; kept open.
    size : int
        Bytes.
    on_unused : callable, optional
        Called, from any thread, when the last lease has ended.
    copy_on_write : bool (default: False)
        What is written here stays here.
    """

    def __init__(
        self,
        number: int,
        fd: int,
        size: int,
        on_unused: Callable[[int], None] | None = None,
        copy_on_write: bool = False,
    ) -> None:
        self.number, self.fd, self.size = number, fd, size
        mode = mmap.MAP_PRIVATE if copy_on_write else mmap.MAP_SHARED
        self._memory = mmap.mmap(fd, size, mode)
        self.address = _address(np.frombuffer(self._memory, np.uint8))
        self._on_unused = on_unused
        self._leases: dict[int, weakref.ref[Lease]] = {}
        self.holders: set[object] = set()
        """The peers that may still have a view on it."""
        self.retired = False
        """Whether its pool has given it up: peers should unmap it."""
        self._closer = weakref.finalize(self, os.close, fd)

    @property
    def in_use(self) -> bool:
        """Whether anybody, here or there, may still look at it."""
        return bool(self._leases or self.holders)

    def lease(self) -> Lease:
        """Return the whole block as bytes."""
        # On the map itself: of an array on another array numpy would keep that one only.
        lease = Lease((self.size,), np.uint8, buffer=self._memory)
        key = id(lease)
        self._leases[key] = weakref.ref(lease, lambda _: self._end_lease(key))
        return lease

    def holds(self, array: AnyArray) -> bool:
        """Whether an array's memory is in this block."""
        return self.address <= _address(array) <= self.address + self.size - array.nbytes

    def copy_on_write(self) -> "Block":
        """Return the same memory, mapped once more: what is written there stays there."""
        return Block(self.number, os.dup(self.fd), self.size, copy_on_write=True)

    def _end_lease(self, key: int) -> None:
        del self._leases[key]
        if not self._leases and self._on_unused is not None:
            self._on_unused(self.number)


def view(lease: Lease, offset: int, dtype: str, shape: Sequence[int]) -> AnyArray:
    """Return an array in a leased block; it keeps the lease alive."""
    return np.ndarray(tuple(shape), dtype, buffer=lease, offset=offset)


@dataclass(frozen=True)
class Placement:
    """Where arrays are in a block.

    Parameters
    ----------
    block : Block
        Which one.
    offsets : tuple of int
        Bytes, one per array.
    lease : Lease
        Keeps the block from being used for something else.
    """

    block: Block
    offsets: tuple[int, ...]
    lease: Lease = field(repr=False)


class Pool:
    """The blocks that this process makes, used again when nobody looks at them any more.

    Parameters
    ----------
    what : str (default: "sharing arrays between processes")
        What they are for, for the refusal when memory is short.
    """

    def __init__(self, what: str = "sharing arrays between processes") -> None:
        self._what = what
        self._blocks: dict[int, Block] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all its blocks."""
        return sum(block.size for block in list(self._blocks.values()))

    def place(self, arrays: Sequence[AnyArray]) -> Placement:
        """Return where these arrays are in shared memory; copy them there unless they are.

        Parameters
        ----------
        arrays : sequence of numpy.ndarray
            In C order, at least one.

        Raises
        ------
        UsageError
            If there is not enough free memory.
        """
        return self._found(arrays) or self._copied(arrays)

    def _found(self, arrays: Sequence[AnyArray]) -> Placement | None:
        """Return where they are, if all of them are in one block of this pool."""
        with self._lock:
            for block in self._blocks.values():
                if block.holds(arrays[0]) and all(map(block.holds, arrays)):
                    offsets = tuple(_address(array) - block.address for array in arrays)
                    return Placement(block, offsets, block.lease())
        return None

    def _copied(self, arrays: Sequence[AnyArray]) -> Placement:
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            block = self._free_block(max(end, 1))
            lease = block.lease()
        for offset, array in zip(offsets, arrays, strict=True):
            view(lease, offset, array.dtype.str, array.shape)[...] = array
        return Placement(block, tuple(offsets), lease)

    def _free_block(self, size: int) -> Block:
        free = [block for block in self._blocks.values() if not block.in_use]
        largest = max(2 * size, size + _SPARE_BYTES)
        fitting = [block for block in free if size <= block.size <= largest]
        if fitting:
            return min(fitting, key=lambda block: block.size)
        for block in free:  # of a model that is sent no more
            block.retired = True
            del self._blocks[block.number]
        require_bytes(size, self._what)
        block = Block(next(_numbers), _anonymous_file(size), size)
        self._blocks[block.number] = block
        return block


def _address(array: AnyArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _anonymous_file(size: int) -> int:
    if sys.platform == "linux":
        fd = os.memfd_create("blsgd")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
