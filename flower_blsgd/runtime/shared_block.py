"""Blocks of memory that two processes see."""

import itertools
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]

_numbers = itertools.count(1)


class Lease(np.ndarray[Any, Any]):
    """The whole of a block, in use for as long as this array or any view on it lives.

    numpy keeps the owner of a view's memory alive: it goes from array to array, past those of the
    view's own class, and stops here because this class is another and owns a map, not an array.
    """

    block: "Block"
    """Of which it is the whole."""


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
        self._closer = weakref.finalize(self, os.close, fd)
        mode = mmap.MAP_PRIVATE if copy_on_write else mmap.MAP_SHARED
        self._memory = mmap.mmap(fd, size, mode)
        self.address = address_of(np.frombuffer(self._memory, np.uint8))
        self._on_unused = on_unused
        self._leases: dict[int, weakref.ref[Lease]] = {}
        self.holders: set[object] = set()
        """The peers that may still have a view on it."""
        self.retired = False
        """Whether its pool has given it up: peers should unmap it."""
        self.clean_for: object = None
        """The layout whose gaps hold zeros."""
        self.pinned: bool | None = None
        """Whether CUDA has registered it here; None if it was not asked to."""

    @property
    def in_use(self) -> bool:
        """Whether anybody, here or there, may still look at it."""
        return bool(self._leases or self.holders)

    def lease(self) -> Lease:
        """Return the whole block as bytes."""
        # On the map itself: of an array on another array numpy would keep that one only.
        lease = Lease((self.size,), np.uint8, buffer=self._memory)
        lease.block = self
        key = id(lease)
        self._leases[key] = weakref.ref(lease, lambda _: self._end_lease(key))
        return lease

    def holds(self, array: AnyArray) -> bool:
        """Whether an array's memory is in this block."""
        return self.address <= address_of(array) <= self.address + self.size - array.nbytes

    def release(self, holder: object) -> None:
        """Take note that a peer has no view on it any more."""
        self.holders.discard(holder)
        if self._on_unused is not None and not self.in_use:
            self._on_unused(self.number)

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


def address_of(array: AnyArray) -> int:
    """Return where an array's elements begin."""
    address: int = array.__array_interface__["data"][0]
    return address


def new_block(size: int, on_unused: Callable[[int], None]) -> Block:
    """Return a block of `size` bytes, all zero."""
    return Block(next(_numbers), _anonymous_file(size), size, on_unused)


def _anonymous_file(size: int) -> int:
    if sys.platform == "linux":
        fd = os.memfd_create("blsgd")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
