"""``x + sum_i s_i (x_i - x)`` over many elements, near the bandwidth of the memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .pieces import AnyArray, Piece, cut, scratch
from .shared_work import share, threads_for

_Tensors = Sequence[AnyArray]
"""Of one model: flat, of one dtype."""

_PIECES_PER_THREAD = 4
"""So that a thread that is held up leaves its share to the others."""


def sum_into(out: _Tensors, models: Sequence[_Tensors], scales: Sequence[float]) -> None:
    """Write ``x + sum_i s_i (x_i - x)``, tensor by tensor.

    Every operation is one of IEEE arithmetic on one element, in a fixed order. So each element
    of the result is the same to the bit however the tensors are cut, and on every machine.

    Parameters
    ----------
    out : sequence of numpy.ndarray
        Where the results go: flat, contiguous, of one real floating dtype. May not overlap what
        is read.
    models : sequence of sequence of numpy.ndarray
        The tensors of x, and those of each x_i: flat, in the same order and dtype.
    scales : sequence of float
        s_i > 0.
    """
    working = np.result_type(out[0].dtype, np.float32)
    terms, unit = _terms(scales), max(scales, default=1.0)

    def work(pieces: Iterator[Piece]) -> None:
        with scratch(working) as buffers, np.errstate(over="raise", invalid="ignore"):
            for piece in pieces:
                try:
                    _sum_piece(piece, out, models, terms, unit, buffers)
                except FloatingPointError:  # differences of numbers near the largest
                    with np.errstate(over="ignore"):
                        _sum_piece(piece, out, models, terms, unit, buffers)
                        _mend(piece, out, models, scales)

    _work_through(out, working, 1 + len(models), work)


def maximum_into(out: _Tensors, models: Sequence[_Tensors]) -> None:
    """Write the largest of the models' values, tensor by tensor; for `out` see `sum_into`."""
    dtype = out[0].dtype

    def work(pieces: Iterator[Piece]) -> None:
        with scratch(dtype) as buffers:
            for piece in pieces:
                largest = piece.loaded(models[0], buffers[0])
                for model in models[1:]:
                    other = piece.loaded(model, buffers[1])
                    largest = np.maximum(largest, other, out=buffers[0, : piece.size])
                piece.store(largest, out)

    _work_through(out, dtype, 1 + len(models), work)


def _work_through(
    out: _Tensors,
    working: np.dtype[Any],
    passes: int,
    work: Callable[[Iterator[Piece]], None],
) -> None:
    sizes = tuple(tensor.size for tensor in out)
    threads = threads_for(sum(sizes) * working.itemsize * passes)
    parts = threads * _PIECES_PER_THREAD if threads > 1 else 1
    share(cut(sizes, working.itemsize, parts), work, threads)


class _Term(NamedTuple):
    """One model, or two of the largest scale, and the scale in units of the largest."""

    models: tuple[int, ...]
    factor: float


def _terms(scales: Sequence[float]) -> list[_Term]:
    terms: list[_Term] = []
    for place, scale in enumerate(scales, start=1):
        if scale == max(scales) and terms and terms[-1].factor == 1 and len(terms[-1].models) == 1:
            terms[-1] = _Term((*terms[-1].models, place), 1)
        else:
            terms.append(_Term((place,), scale / max(scales)))
    return terms


def _sum_piece(
    piece: Piece,
    out: _Tensors,
    models: Sequence[_Tensors],
    terms: Sequence[_Term],
    unit: float,
    buffers: AnyArray,
) -> None:
    base = piece.loaded(models[0], buffers[0])
    if not terms:
        piece.store(base, out)
        return
    twice, total, part = buffers[1:, : piece.size]
    if any(len(term.models) == 2 for term in terms):
        np.add(base, base, out=twice)
    begun = False
    for (place, *second), factor in terms:
        row = piece.loaded(models[place], part if begun else total)
        if factor != 1:
            target = part if begun else total
            np.subtract(row, base, out=target)
            np.multiply(target, factor, out=target)
            if begun:
                np.add(total, part, out=total)
        elif not second:
            if begun:
                row = np.add(total, row, out=total)
            np.subtract(row, base, out=total)
        else:
            # Workers of one kind have equal scales: two of them in three passes. Twice a number
            # is exact, so that equal models still leave a difference of 0.
            if begun:
                row = np.add(total, row, out=total)
            np.add(row, piece.loaded(models[second[0]], part), out=total)
            np.subtract(total, twice, out=total)
        begun = True
    np.multiply(total, unit, out=total)
    views = piece.views(out)
    in_place = len(views) == 1 and views[0].dtype == total.dtype
    np.add(total, base, out=views[0] if in_place else total)
    if not in_place:
        piece.store(total, out)


def _mend(piece: Piece, out: _Tensors, models: Sequence[_Tensors], scales: Sequence[float]) -> None:
    """Sum in float64 what is not finite, and only that: how tensors are cut must not show."""
    wide = np.result_type(out[0].dtype, np.float64)
    rows = zip(piece.views(out), *(piece.views(model) for model in models), strict=True)
    for narrow, first, *others in rows:
        wrong = ~np.isfinite(narrow)
        base = first[wrong].astype(wide)
        total = np.zeros_like(base)
        for scale, other in zip(scales, others, strict=True):
            total += scale * (other[wrong] - base)
        narrow[wrong] = base + total
