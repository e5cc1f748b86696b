"""Whether tensors are finite, at the price of reading them once."""

from collections.abc import Iterator, Mapping

import numpy as np

from .pieces import AnyArray, Piece, cut, scratch
from .shared_work import share, threads_for


def first_not_finite(tensors: Mapping[str, AnyArray]) -> str | None:
    """Return the name of the first tensor that holds an infinity or no number; None if none does.

    Integers are finite. What is not stays so in every sum: one sum that is finite clears a whole
    piece, and only the others are looked at closely, since large numbers add up to infinity too.
    """
    by_dtype: dict[np.dtype[np.generic], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype.kind in "fc":
            by_dtype.setdefault(tensor.dtype, []).append(name)
    suspects: set[str] = set()
    for dtype, names in by_dtype.items():
        suspects |= _not_summing(dtype, names, [tensors[name].ravel() for name in names])
    for name in tensors:
        if name in suspects and not np.isfinite(tensors[name]).all():
            return name
    return None


def _not_summing(dtype: np.dtype[np.generic], names: list[str], flat: list[AnyArray]) -> set[str]:
    """Return the names of the tensors in pieces whose sum is not finite."""
    suspects: set[str] = set()
    sizes = tuple(tensor.size for tensor in flat)
    threads = threads_for(sum(sizes) * dtype.itemsize)

    def work(pieces: Iterator[Piece]) -> None:
        with scratch(dtype) as buffers, np.errstate(over="ignore", invalid="ignore"):
            for piece in pieces:
                # Five times as fast as numpy.sum.
                total = np.einsum("i->", piece.loaded(flat, buffers[0]))
                if not np.isfinite(total):
                    suspects.update(names[tensor] for tensor in piece.tensors)

    share(cut(sizes, dtype.itemsize, threads), work, threads)
    return suspects
