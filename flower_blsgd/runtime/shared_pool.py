"""The shared memory that a process makes, used again when nobody looks at it any more."""

import bisect
import collections
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..flat_record import ALIGNMENT, Flat, Layout
from .memory import require_bytes
from .shared_block import AnyArray, Block, Lease, address_of, new_block, view

_SPARE_BYTES = 1 << 20
"""A free block may be this much larger than needed, or twice as large."""


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
    """The blocks that this process makes; safe between threads.

    Parameters
    ----------
    what : str (default: "sharing arrays between processes")
        What they are for, for the refusal when memory is short.
    """

    def __init__(self, what: str = "sharing arrays between processes") -> None:
        self._what = what
        self._blocks: dict[int, Block] = {}
        self._places: list[tuple[int, int]] = []
        """Address and number of each block, ascending."""
        # Blocks that may be free: told by weak references, from any thread and also while the
        # lock is held, so nothing but this append may happen there.
        self._told: collections.deque[int] = collections.deque()
        self._free: dict[int, set[int]] = {}
        """Numbers of free blocks by size."""
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all its blocks."""
        return sum(block.size for block in list(self._blocks.values()))

    def new_memory(self, layout: Layout) -> tuple[Lease, int]:
        """Return memory for a record of this layout; the gaps between its arrays hold zeros.

        Raises
        ------
        UsageError
            If there is not enough free memory.
        """
        with self._lock:
            block = self._free_block(max(layout.num_bytes, 1))
            lease = block.lease()
        if block.clean_for is not layout:
            for start, stop in layout.gaps:
                view(lease, start, "u1", (stop - start,)).fill(0)
            block.clean_for = layout
        return lease, 0

    def holds(self, flat: Flat) -> bool:
        """Whether a flat record lies in a block of this pool."""
        memory = flat.memory
        return isinstance(memory, Lease) and (self._blocks.get(memory.block.number) is memory.block)

    def place_flat(self, flat: Flat) -> Placement:
        """Return where a flat record is in shared memory; copy it there unless it is.

        From then on `flat_like` makes more of its kind here.

        Raises
        ------
        UsageError
            If there is not enough free memory.
        """
        memory, base = flat.memory, flat.base
        here = self.holds(flat)
        if here or not isinstance(memory, Lease):
            flat.new_memory = self.new_memory  # what is in another pool is that one's matter
        if not here:
            memory, base = self.new_memory(flat.layout)
            view(memory, base, "u1", (flat.layout.num_bytes,))[...] = flat.bytes
        assert isinstance(memory, Lease)
        offsets = tuple(base + offset for offset in flat.layout.offsets)
        return Placement(memory.block, offsets, memory)

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
        return self.found(arrays) or self._copied(arrays)

    def found(self, arrays: Sequence[AnyArray]) -> Placement | None:
        """Return where these arrays are, if all of them are in one block of this pool."""
        address = address_of(arrays[0])
        with self._lock:
            place = bisect.bisect_right(self._places, address, key=lambda known: known[0]) - 1
            if place < 0:
                return None
            block = self._blocks[self._places[place][1]]
            if not all(map(block.holds, arrays)):
                return None
            offsets = tuple(address_of(array) - block.address for array in arrays)
            return Placement(block, offsets, block.lease())

    def _copied(self, arrays: Sequence[AnyArray]) -> Placement:
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            block = self._free_block(max(end, 1))
            lease = block.lease()
        block.clean_for = None
        for offset, array in zip(offsets, arrays, strict=True):
            view(lease, offset, array.dtype.str, array.shape)[...] = array
        return Placement(block, tuple(offsets), lease)

    def _free_block(self, size: int) -> Block:
        for _ in range(len(self._told)):
            told = self._blocks.get(self._told.popleft())
            if told is not None and not told.in_use:
                self._free.setdefault(told.size, set()).add(told.number)
        largest = max(2 * size, size + _SPARE_BYTES)
        fitting = [s for s, numbers in self._free.items() if numbers and size <= s <= largest]
        if fitting:
            return self._blocks[self._free[min(fitting)].pop()]
        for numbers in self._free.values():  # of a model that is sent no more
            for number in numbers:
                self._blocks.pop(number).retired = True
        self._free.clear()
        self._places = [place for place in self._places if place[1] in self._blocks]
        require_bytes(size, self._what)
        block = new_block(size, self._told.append)
        self._blocks[block.number] = block
        bisect.insort(self._places, (block.address, block.number))
        return block
