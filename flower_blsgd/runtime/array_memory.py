"""The elements of a Flower array, without a copy."""

import functools
import io
import math
from collections.abc import Sequence

import numpy as np
from flwr.app import Array

from ..array_view import AnyArray, ArrayView


def is_plain(array: AnyArray) -> bool:
    """Whether its elements are numbers, times or texts: the dtype is in a short name."""
    return array.dtype.kind in "biufcmMSU"


def memory_of(array: Array) -> AnyArray | None:
    """Return an array's elements, contiguous, without a copy where that is possible.

    Returns
    -------
    ndarray or None
        None if it is not what it says it is, or its elements are no plain numbers.
    """
    if isinstance(array, ArrayView):
        return contiguous(array.memory) if is_plain(array.memory) else None
    if array.stype != "numpy.ndarray":
        return None
    try:
        header = _header(array.dtype, tuple(array.shape))
    except (TypeError, ValueError):
        return None
    dtype = np.dtype(array.dtype)
    size = dtype.itemsize * math.prod(array.shape)
    if not array.data.startswith(header) or len(array.data) != len(header) + size:
        return None
    return np.frombuffer(array.data, dtype, offset=len(header)).reshape(array.shape)


def contiguous(array: AnyArray) -> AnyArray:
    """Return the array, or a contiguous copy of the same shape."""
    return np.ascontiguousarray(array).reshape(array.shape)  # which makes 0-d arrays 1-d


@functools.lru_cache(maxsize=4096)
def _header(dtype: str, shape: Sequence[int]) -> bytes:
    """Return what ``numpy.save`` writes before the elements."""
    if np.dtype(dtype).hasobject:
        raise TypeError(f"{dtype} has no plain bytes")
    buffer = io.BytesIO()
    description = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()
