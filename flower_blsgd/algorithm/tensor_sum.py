"""Sums of models, ``x + sum_i s_i (x_i - x)``, near memory bandwidth.

Tensors are cut into chunks that fit a core's cache, and a few threads process them. Each element is
computed by IEEE operations in a fixed order, so the result is bit-identical for all chunk sizes,
numbers of threads and machines.
"""

import cmath
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]
_Part = TypeVar("_Part")

CHUNK_BYTES = 1 << 19
"""Large enough to hide the cost of a numpy call, small enough for a core's cache."""

_MOST_THREADS = 8  # a few cores saturate the memory
_ONE_THREAD_BYTES = 1 << 25
"""Below this size, 1 to 2 ms, threads save little and cost much on a busy machine."""


_kept = threading.local()


def _scratch(dtype: np.dtype[Any], size: int) -> AnyArray:
    """Return three rows of `size` elements, at most a chunk, from this thread's buffer."""
    if not hasattr(_kept, "memory"):
        # An element may be twice as wide as in its chunk: float16 is summed in float32.
        _kept.memory = np.empty((3, 2 * CHUNK_BYTES), np.uint8)
    rows: AnyArray = _kept.memory.view(dtype)[:, :size]
    return rows


def num_threads() -> int:
    """Return the number of threads: this process's cores, or torch's setting if lower."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    # Only if torch is already loaded, because importing it takes seconds.
    of_torch: Callable[[], int] | None = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return max(1, min(cores, _MOST_THREADS, of_torch() if of_torch else cores))


def threads_for(num_bytes: int) -> int:
    """Return the best number of threads for a sum that reads and writes `num_bytes`."""
    return num_threads() if num_bytes >= _ONE_THREAD_BYTES else 1


def share(
    parts: Iterable[_Part], work: Callable[[_Part], object], threads: int, **errors: Any
) -> None:
    """Call `work` once with every part, in several threads, and wait for all of them.

    The parts must be independent. The error of a thread is raised after all threads have ended.
    `errors` are those of `numpy.errstate`.
    """
    waiting = iter(list(parts))  # threads may share a list's iterator

    def work_on() -> None:
        with np.errstate(**errors):
            for part in waiting:
                work(part)

    if threads == 1:
        work_on()
        return
    running = [_executor(os.getpid()).submit(work_on) for _ in range(threads)]
    wait(running)
    for thread in running:
        thread.result()


@functools.lru_cache(maxsize=1)
def _executor(process: int) -> ThreadPoolExecutor:
    """Return this process's threads; a fork has none of its parent's threads."""
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix=f"average-{process}")


def _chunks(flat: Sequence[AnyArray]) -> list[tuple[int, slice]]:
    """Return chunks that cover flat tensors: the index of the tensor, and a slice."""
    chunks = []
    for i, tensor in enumerate(flat):
        step = CHUNK_BYTES // tensor.itemsize
        chunks += [(i, slice(start, start + step)) for start in range(0, tensor.size, step)]
    return chunks


def move(
    first: Mapping[str, AnyArray],
    others: Sequence[Mapping[str, AnyArray]],
    scales: Sequence[float],
    out: Mapping[str, AnyArray] | None = None,
) -> dict[str, AnyArray]:
    """Return ``x + sum_i s_i (x_i - x)`` of floating tensors, and the maximum of all others.

    `first` is x; `others` are the x_i, with at least the names of x. Sums run in their order; pass
    worker order. The `scales` s_i >= 0 need not add up to 1; models with scale 0 are ignored. If
    `out` is given, the result is written to it; it must not overlap the models. ValueError if the
    shapes or dtypes of a tensor differ, including `out`.
    """
    names = list(first)
    counted = [model for model, scale in zip(others, scales, strict=True) if scale > 0]
    scales = [scale for scale in scales if scale > 0]
    models = [[model[name] for name in names] for model in (first, *counted)]
    if out is None:
        moved = [np.empty(tensor.shape, tensor.dtype) for tensor in models[0]]
    else:
        moved = [out[name] for name in names]
    for tensors in (*models[1:], moved):
        _require_alike(names, models[0], tensors)
    flat_out, *flat = ([tensor.ravel() for tensor in tensors] for tensors in (moved, *models))
    terms = _terms(scales)
    unit = max(scales, default=1.0)

    def work(chunk: tuple[int, slice]) -> None:
        i, part = chunk
        target = flat_out[i][part]
        rows = [model[i][part] for model in flat]
        if target.dtype.kind not in "fc":
            np.maximum.reduce(rows, out=target)
            return
        try:
            _sum(target, rows, terms, unit)
        except FloatingPointError:  # near the largest number, as in a mask
            with np.errstate(over="ignore"):
                _sum(target, rows, terms, unit)
                _sum_in_float64(target, rows, scales)

    num_bytes = sum(tensor.nbytes for tensor in flat_out)
    threads = threads_for(num_bytes * (1 + len(models)))
    share(_chunks(flat_out), work, threads, over="raise", invalid="ignore")
    for tensor, result in zip(moved, flat_out, strict=True):
        if not tensor.flags.c_contiguous:  # ravel made a copy
            tensor[...] = result.reshape(tensor.shape)
    return dict(zip(names, moved, strict=True))


def _require_alike(
    names: Sequence[str], tensors: Sequence[AnyArray], others: Sequence[AnyArray]
) -> None:
    for name, one, other in zip(names, tensors, others, strict=True):
        if one.shape != other.shape:
            raise ValueError(f"tensor {name!r} has shapes {one.shape} and {other.shape}")
        if one.dtype != other.dtype:
            raise ValueError(f"tensor {name!r} has dtypes {one.dtype} and {other.dtype}")


class _Term(NamedTuple):
    """One model, or two with the largest scale, and the scale relative to the largest."""

    models: tuple[int, ...]
    factor: float


def _terms(scales: Sequence[float]) -> list[_Term]:
    terms: list[_Term] = []
    for i, scale in enumerate(scales, start=1):
        if scale == max(scales) and terms and terms[-1].factor == 1 and len(terms[-1].models) == 1:
            terms[-1] = _Term((*terms[-1].models, i), 1)
        else:
            terms.append(_Term((i,), scale / max(scales)))
    return terms


def _sum(out: AnyArray, rows: Sequence[AnyArray], terms: Sequence[_Term], unit: float) -> None:
    """Write ``x + sum_i s_i (x_i - x)`` of one chunk, in float32 or the tensors' wider dtype."""
    working = np.result_type(out.dtype, np.float32)
    base, *others = (row.astype(working, copy=False) for row in rows)
    if not terms:
        out[...] = base
        return
    total, part, twice = _scratch(working, out.size)
    if any(len(term.models) == 2 for term in terms):
        np.add(base, base, out=twice)
    for n, ((i, *second), factor) in enumerate(terms):
        row = others[i - 1]
        target = part if n else total
        if factor != 1:
            np.subtract(row, base, out=target)
            np.multiply(target, factor, out=target)
            if n:
                np.add(total, part, out=total)
            continue
        if n:
            row = np.add(total, row, out=total)
        if second:
            # Equal workers have equal scales: two models take three passes. Doubling is exact, so
            # equal models still have a difference of 0.
            row = np.add(row, others[second[0] - 1], out=total)
        np.subtract(row, twice if second else base, out=total)
    np.multiply(total, unit, out=total)
    np.add(total, base, out=out, casting="same_kind")


def _sum_in_float64(out: AnyArray, rows: Sequence[AnyArray], scales: Sequence[float]) -> None:
    """Recompute the elements that are not finite in float64.

    All others stay, so that the result does not depend on the chunks.
    """
    wrong = ~np.isfinite(out)
    wide = np.result_type(out.dtype, np.float64)
    base, *others = (row[wrong].astype(wide) for row in rows)
    total = np.zeros_like(base)
    for scale, other in zip(scales, others, strict=True):
        total += scale * (other - base)
    out[wrong] = base + total


def first_not_finite(tensors: Mapping[str, AnyArray]) -> str | None:
    """Return the name of the first tensor with an infinity or nan; None if all are finite.

    A finite sum proves that a whole chunk is finite. Otherwise its elements are checked, because
    large finite numbers may also add up to infinity.
    """
    names = [name for name, tensor in tensors.items() if tensor.dtype.kind in "fc"]
    flat = [tensors[name].ravel() for name in names]
    found: list[int] = []

    def work(chunk: tuple[int, slice]) -> None:
        i, part = chunk
        values = flat[i][part]
        total = np.einsum("i->", values)  # five times as fast as numpy.sum
        if not cmath.isfinite(total) and not np.isfinite(values).all():
            found.append(i)

    threads = threads_for(sum(tensor.nbytes for tensor in flat))
    share(_chunks(flat), work, threads, over="ignore", invalid="ignore")
    return names[min(found)] if found else None
