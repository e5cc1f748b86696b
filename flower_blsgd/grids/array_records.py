"""Flower arrays as views on memory, and records of them that lie in one piece.

A record whose arrays lie one behind the other, `flat_record`, is copied, checked
and averaged as one array of each dtype, and its place is named in one line.
"""

import functools
import io
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

from .flower_internals import filled_unchecked

AnyArray = npt.NDArray[Any]

_NUMPY = "numpy.ndarray"  # Flower's name of the form that its arrays are serialised in


class ArrayView(Array):
    """An array of a record whose memory is somebody's ndarray, without a copy.

    Flower's own Array holds serialised bytes: two copies to make one, two to read it. This one
    makes the bytes only where they are needed, on a wire, and then they are the same bytes.
    `numpy` returns the memory itself, so whoever writes to it changes the array.

    Pickled or copied it becomes a plain Array.

    Parameters
    ----------
    ndarray : numpy.ndarray
        Must not change while the record is in use.
    dtype : str, optional
        The name of its dtype, where it is known already: asking numpy takes longer than all else.
    """

    def __init__(self, ndarray: AnyArray, dtype: str = "") -> None:
        # Not through __setattr__, which invalidates serialised bytes.
        self.__dict__.update(
            dtype=dtype or str(ndarray.dtype), shape=ndarray.shape, stype=_NUMPY, _memory=ndarray
        )

    def numpy(self) -> AnyArray:
        """Return the array's memory, not a copy."""
        return self.memory

    @property
    def memory(self) -> AnyArray:
        """The array's memory itself, also where `numpy` returns a copy."""
        memory: AnyArray = self.__dict__["_memory"]
        return memory

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The serialised bytes, made anew."""
        buffer = io.BytesIO()
        np.save(buffer, self.memory, allow_pickle=False)
        return buffer.getvalue()

    @property
    def is_dirty(self) -> bool:
        """Always: a change of the memory is not noticed."""
        return True

    @is_dirty.setter
    def is_dirty(self, value: bool) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        theirs = (other.dtype, tuple(other.shape), other.stype)
        return (self.dtype, self.shape, self.stype) == theirs and self.data == other.data

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


class PrivateArray(ArrayView):
    """An array that behaves as Flower's own: every `numpy` is a copy."""

    def numpy(self) -> AnyArray:
        """Return a copy of the memory."""
        return self.memory.copy()


# The type that Flower writes on the wire is the class's name.
ArrayView.__qualname__ = PrivateArray.__qualname__ = Array.__qualname__


def view_record(tensors: Mapping[str, AnyArray]) -> ArrayRecord:
    """Return a record of views. ``ArrayRecord({...})`` would make plain arrays of them."""
    return record_of({name: ArrayView(tensor) for name, tensor in tensors.items()})


def record_of(arrays: dict[str, Array]) -> ArrayRecord:
    """Return a record of these very arrays, without Flower's checks."""
    return filled_unchecked(ArrayRecord(), arrays)


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether elements of this dtype are numbers, times or texts: it is in a short name."""
    return dtype.kind in "biufcmMSU"


def memory_of(array: Array) -> AnyArray | None:
    """Return an array's elements, contiguous, without a copy where that is possible.

    Returns
    -------
    ndarray or None
        None if it is not what it says it is, or its elements are no plain numbers.
    """
    if isinstance(array, ArrayView):
        memory = array.memory
        if not is_plain(memory.dtype):
            return None
        # A contiguous copy of a 0-d array would be 1-d.
        return np.ascontiguousarray(memory).reshape(memory.shape)
    if array.stype != _NUMPY:
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


@functools.lru_cache(maxsize=4096)
def _header(dtype: str, shape: Sequence[int]) -> bytes:
    """Return what ``numpy.save`` writes before the elements."""
    if np.dtype(dtype).hasobject:
        raise TypeError(f"{dtype} has no plain bytes")
    buffer = io.BytesIO()
    description = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


# --- records in one piece of memory -----------------------------------------------------------

ALIGNMENT = 64
"""Bytes: a cache line, and what vector instructions like."""

_FLAT = "_blsgd_flat"

Kind = tuple[str, str, tuple[int, ...]]
"""Name, dtype as a Flower array names it, and shape of an array."""


@dataclass(frozen=True)
class Layout:
    """Where each array of a record is: one behind the other, each at the start of a cache line.

    Parameters
    ----------
    kinds : tuple of Kind
        Of the arrays, in the record's order.
    """

    kinds: tuple[Kind, ...]

    @classmethod
    def of(cls, kinds: Iterable[Kind]) -> "Layout":
        """Return the layout of these arrays; the same object for the same arrays."""
        return _layout_of(tuple(kinds))

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of the arrays."""
        return [name for name, _, _ in self.kinds]

    @functools.cached_property
    def places(self) -> list[tuple[str, str, np.dtype[Any], tuple[int, ...], int]]:
        """Name, name of the dtype, dtype, shape and offset (in bytes) of each array."""
        return [
            (name, dtype, np.dtype(dtype), shape, offset)
            for (name, dtype, shape), offset in zip(self.kinds, [0, *self.ends], strict=False)
        ]

    @functools.cached_property
    def ends(self) -> list[int]:
        """Where the cache lines of each array end, in bytes."""
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in self.kinds]
        return list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that this layout needs."""
        return self.ends[-1] if self.kinds else 0

    @functools.cached_property
    def runs(self) -> list[tuple[np.dtype[Any], int, int]]:
        """Neighbours of one dtype as one array: dtype, offset and number of elements."""
        runs = []
        arrays = zip(self.places, self.ends, strict=True)
        for dtype, group in itertools.groupby(arrays, lambda array: array[0][2]):
            neighbours = list(group)
            (*_, begin), end = neighbours[0][0], neighbours[-1][1]
            runs.append((dtype, begin, (end - begin) // dtype.itemsize))
        return runs


_layout_of = functools.lru_cache(maxsize=256)(Layout)


NewMemory = Callable[[Layout], AnyArray]
"""Returns uint8 for a record of this layout, or a few more; zero where no array is."""


@dataclass(slots=True, eq=False)
class Flat:
    """The memory of a record that lies in one piece.

    Parameters
    ----------
    layout : Layout
        Where each array is.
    memory : numpy.ndarray of uint8
        What they lie in; it may be longer.
    arrays : tuple of Array
        The record's arrays when it was made.
    new_memory : callable, optional
        Where another such record is to be.
    """

    layout: Layout
    memory: AnyArray
    arrays: tuple[Array, ...]
    new_memory: NewMemory | None

    @property
    def bytes(self) -> AnyArray:
        """The memory of the arrays, uint8."""
        # Not a slice: of a view of its own class numpy keeps the owner only.
        return np.ndarray(self.layout.num_bytes, np.uint8, self.memory)

    def runs(self) -> dict[str, AnyArray]:
        """Return neighbours of one dtype as one array each; the gaps between them hold zeros."""
        return {
            str(offset): np.ndarray(count, dtype, self.memory, offset)
            for dtype, offset, count in self.layout.runs
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a record that is pickled or copied has arrays of its own


def flat_record(
    layout: Layout,
    memory: AnyArray | None = None,
    new_memory: NewMemory | None = None,
    kind: type[ArrayView] = ArrayView,
) -> ArrayRecord:
    """Return a record of views on a piece of memory.

    Parameters
    ----------
    layout : Layout
        Names, dtypes, shapes and places of the arrays.
    memory : numpy.ndarray of uint8, optional
        Where they are; by default new memory.
    new_memory : callable, optional
        Makes the memory; `flat_like` asks it for more of the same kind.
    kind : type (default: ArrayView)
        Of the arrays.
    """
    if memory is None:
        memory = (new_memory or _own_memory)(layout)
    ndarray = np.ndarray
    arrays: dict[str, Array] = {
        name: kind(ndarray(shape, dtype, memory, offset), dtype_name)
        for name, dtype_name, dtype, shape, offset in layout.places
    }
    record = record_of(arrays)
    record.__dict__[_FLAT] = Flat(layout, memory, tuple(arrays.values()), new_memory)
    return record


def flat_like(record: ArrayRecord, layout: Layout | None = None) -> ArrayRecord:
    """Return a record to be filled, in memory of the kind that another one lies in.

    Parameters
    ----------
    record : ArrayRecord
        The other one, such as the global model of an order; on the local grid it lies in shared
        memory, and what is to be sent next is best written there.
    layout : Layout, optional
        By default that of the other one.
    """
    flat = flat_of(record)
    kinds = ((name, array.dtype, tuple(array.shape)) for name, array in record.items())
    layout = layout or (flat.layout if flat else Layout.of(kinds))
    return flat_record(layout, new_memory=flat.new_memory if flat else None)


def flat_of(record: ArrayRecord) -> Flat | None:
    """Return where a record lies; None if it does not lie in one piece, or was changed since."""
    flat: Flat | None = record.__dict__.get(_FLAT)
    if flat is None or len(record) != len(flat.arrays):
        return None
    same = all(map(operator.is_, record.values(), flat.arrays))
    return flat if same and list(record) == flat.layout.names else None


class FlatTensors(dict[str, AnyArray]):
    """The tensors of a flat record by name, without a copy.

    Parameters
    ----------
    record : ArrayRecord
        Not to be changed meanwhile.
    flat : Flat
        Where it lies.
    """

    def __init__(self, record: ArrayRecord, flat: Flat) -> None:
        super().__init__({name: array.memory for name, array in record.items()})  # type: ignore[attr-defined]  # all are views
        self.flat = flat


def tensors_of(record: ArrayRecord) -> dict[str, AnyArray]:
    """Return a record's tensors by name; `FlatTensors` where it lies in one piece."""
    flat = flat_of(record)
    if flat is not None:
        return FlatTensors(record, flat)
    return {name: array.numpy() for name, array in record.items()}


def common_runs(*models: Mapping[str, AnyArray]) -> list[dict[str, AnyArray]] | None:
    """Return all models as a few long arrays each, if all lie in the same way in one piece.

    What is done to every element alike can then be done to them instead of to the tensors.
    """
    first = models[0]
    if not isinstance(first, FlatTensors):
        return None
    layout = first.flat.layout
    flats = [m.flat for m in models if isinstance(m, FlatTensors) and m.flat.layout == layout]
    return [flat.runs() for flat in flats] if len(flats) == len(models) else None


def _own_memory(layout: Layout) -> AnyArray:
    memory = np.zeros(layout.num_bytes + ALIGNMENT, np.uint8)
    address: int = memory.__array_interface__["data"][0]
    return memory[-address % ALIGNMENT :]
