"""Cut tensors into pieces that fit into a cache, and lay small ones end to end."""

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]

PIECE_BYTES = 1 << 19
"""Large enough that a call of numpy costs little beside it, small enough for a core's cache."""

_SMALL_BYTES = 1 << 15
"""Tensors below this are laid end to end: copying them costs less than calls for each."""

_SCRATCH_BUFFERS = 4


class Piece(NamedTuple):
    """A part of one of several flat tensors, or several whole small ones.

    Parameters
    ----------
    tensors : tuple of int
        Which.
    start, stop : int
        The part of the one, or from 0 to the size of all.
    """

    tensors: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start

    def views(self, flat: Sequence[AnyArray]) -> list[AnyArray]:
        """Return its parts of a model's flat tensors."""
        if len(self.tensors) == 1:
            return [flat[self.tensors[0]][self.start : self.stop]]
        return [flat[tensor] for tensor in self.tensors]

    def loaded(self, flat: Sequence[AnyArray], buffer: AnyArray) -> AnyArray:
        """Return its elements in one run and in the dtype of the buffer.

        That is where they are, if they are so already; else the buffer.
        """
        views = self.views(flat)
        if len(views) == 1 and views[0].dtype == buffer.dtype:
            return views[0]
        filled = buffer[: self.size]
        np.concatenate(views, out=filled, casting="same_kind")
        return filled

    def store(self, values: AnyArray, flat: Sequence[AnyArray]) -> None:
        """Copy its elements to where they belong, in the dtype of the tensors."""
        start = 0
        for view in self.views(flat):
            stop = start + view.size
            view[...] = values[start:stop]
            start = stop


@functools.lru_cache(maxsize=64)
def cut(sizes: tuple[int, ...], itemsize: int, parts: int = 1) -> tuple[Piece, ...]:
    """Return pieces that cover every element of every tensor once.

    Parameters
    ----------
    sizes : tuple of int
        Elements of each tensor.
    itemsize : int
        Bytes of an element.
    parts : int (default: 1)
        At least about so many pieces, where the tensors are large enough.
    """
    small = _SMALL_BYTES // itemsize
    longest = max(small, min(PIECE_BYTES // itemsize, -(-sum(sizes) // parts)))
    pieces: list[Piece] = []
    pack: list[int] = []
    packed = 0
    for tensor, size in enumerate(sizes):
        if size >= small:
            count = -(-size // longest)
            bounds = [size * place // count for place in range(count + 1)]
            pieces += [Piece((tensor,), *both) for both in itertools.pairwise(bounds)]
        elif size:
            if packed + size > longest:
                pieces.append(Piece(tuple(pack), 0, packed))
                pack, packed = [], 0
            pack.append(tensor)
            packed += size
    if pack:
        pieces.append(Piece(tuple(pack), 0, packed))
    return tuple(pieces)


_free: deque[AnyArray] = deque()


@contextmanager
def scratch(dtype: npt.DTypeLike) -> Iterator[AnyArray]:
    """Lend four buffers of a piece's size, one after another in one array; they are kept."""
    try:
        memory = _free.pop()
    except IndexError:
        memory = np.empty((_SCRATCH_BUFFERS, PIECE_BYTES), np.uint8)
    try:
        yield memory.view(dtype)
    finally:
        _free.append(memory)
