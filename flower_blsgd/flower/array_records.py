"""Flower arrays as views on memory, and records whose arrays are contiguous.

A contiguous record (`flat_record`) is copied, checked and averaged as one array per dtype.
"""

import functools
import io
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

from .internals import filled_unchecked

AnyArray = npt.NDArray[Any]

_NUMPY = "numpy.ndarray"  # Flower's name of its serialised form


class ArrayView(Array):
    """A Flower array that refers to an ndarray without copying it.

    Flower's own Array holds serialised bytes, which cost two copies to write and two to read. This
    class serialises, to the same bytes, only when the array goes over a wire. `numpy` returns the
    memory itself, so writing to it changes the array. It must not change while the record is in
    use. A pickle or a copy is a plain Array.
    """

    def __init__(self, ndarray: AnyArray) -> None:
        # Not through __setattr__, which invalidates serialised bytes.
        self.__dict__.update(
            dtype=str(ndarray.dtype), shape=ndarray.shape, stype=_NUMPY, _memory=ndarray
        )

    def numpy(self) -> AnyArray:
        """Return the array's memory, not a copy."""
        return self.memory

    @property
    def memory(self) -> AnyArray:
        """The array's memory itself, even if `numpy` returns a copy."""
        own = self.__dict__
        memory: AnyArray = own["_memory"]
        place: Place | None = own.get("_place")
        return memory if place is None else place.view(memory)

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The serialised bytes, computed on each access."""
        buffer = io.BytesIO()
        np.save(buffer, self.memory, allow_pickle=False)
        return buffer.getvalue()

    @property
    def is_dirty(self) -> bool:
        """Always True, since changes of the memory cannot be detected."""
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
    """An `ArrayView` that behaves like Flower's own arrays: `numpy` returns a copy.

    For code of users, which may change what it reads. Our own code reads `tensors_of` a record.
    """

    def numpy(self) -> AnyArray:
        """Return a copy of the memory."""
        return self.memory.copy()


# Flower writes the name of the class on the wire.
ArrayView.__qualname__ = PrivateArray.__qualname__ = Array.__qualname__


def view_record(tensors: Mapping[str, AnyArray]) -> ArrayRecord:
    """Return a record of views; ``ArrayRecord({...})`` would convert them to plain arrays."""
    return record_of({name: ArrayView(tensor) for name, tensor in tensors.items()})


def record_of(arrays: dict[str, Array]) -> ArrayRecord:
    """Return a record of these very arrays, without Flower's checks."""
    return filled_unchecked(ArrayRecord(), arrays)


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether elements of this dtype are numbers, times or texts."""
    return dtype.kind in "biufcmMSU"


def elements_of(array: Array) -> AnyArray:
    """Return an array's elements, without a copy if it is a view."""
    return array.memory if isinstance(array, ArrayView) else array.numpy()


def memory_of(array: Array) -> AnyArray | None:
    """Return an array's elements, contiguous, without a copy where possible.

    None if the payload does not match dtype and shape, or `is_plain` is False.
    """
    if isinstance(array, ArrayView):
        memory = array.memory
        if not is_plain(memory.dtype):
            return None
        # A contiguous copy of a 0-d array would be 1-d.
        return np.ascontiguousarray(memory).reshape(memory.shape)
    if array.stype != _NUMPY:
        return None
    data = array.data
    shape = tuple(array.shape)
    fortran = b"'fortran_order': True" in data[:128]
    try:
        header = _header(array.dtype, shape, fortran)
    except (TypeError, ValueError):
        return None
    dtype = np.dtype(array.dtype)
    num_bytes = len(header) + dtype.itemsize * math.prod(shape)
    if not is_plain(dtype) or not data.startswith(header) or len(data) != num_bytes:
        return None
    elements = np.ndarray(shape, dtype, data, len(header), order="F" if fortran else "C")
    return np.ascontiguousarray(elements).reshape(shape)


@functools.lru_cache(maxsize=4096)
def _header(dtype: str, shape: Sequence[int], fortran: bool) -> bytes:
    """Return the header that ``numpy.save`` writes before the elements."""
    if np.dtype(dtype).hasobject:
        raise TypeError(f"{dtype} has no plain bytes")
    buffer = io.BytesIO()
    description = {"descr": np.dtype(dtype).str, "fortran_order": fortran, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


# --- contiguous records -----------------------------------------------------------------------

ALIGNMENT = 64
"""Alignment of arrays in bytes: a cache line, which suits vector instructions."""

_FLAT = "_blsgd_flat"

Kind = tuple[str, str, tuple[int, ...]]
"""Name, dtype as a Flower array names it, and shape of an array."""


class Place(NamedTuple):
    """Position of an array: `dtype_name` is that of a Flower array, and `offset` is in bytes."""

    name: str
    dtype_name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def view(self, memory: AnyArray) -> AnyArray:
        """Return the array in the memory (uint8) of its record."""
        return np.ndarray(self.shape, self.dtype, memory, self.offset)


@dataclass(frozen=True)
class Layout:
    """Positions of a record's arrays in one piece of memory, each at the start of a cache line."""

    kinds: tuple[Kind, ...]

    @classmethod
    def of(cls, kinds: Iterable[Kind]) -> "Layout":
        """Return the layout of these arrays. Equal arguments give the same object."""
        return _layout_of(tuple(kinds))

    @functools.cached_property
    def places(self) -> list[Place]:
        """The position of each array."""
        return [
            Place(name, dtype, np.dtype(dtype), shape, offset)
            for (name, dtype, shape), offset in zip(self.kinds, [0, *self.ends], strict=False)
        ]

    @functools.cached_property
    def ends(self) -> list[int]:
        """Offset of the end of each array's last cache line, in bytes."""
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in self.kinds]
        return list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))

    @property
    def num_bytes(self) -> int:
        """Size of the memory in bytes."""
        return self.ends[-1] if self.kinds else 0

    def views(self, memory: AnyArray) -> list[AnyArray]:
        """Return the arrays in a piece of memory (uint8)."""
        return [place.view(memory) for place in self.places]

    @functools.cached_property
    def attributes(self) -> list[tuple[str, dict[str, object]]]:
        """Name of each array, and the attributes of its view in any memory."""
        return [
            (p.name, {"dtype": p.dtype_name, "shape": p.shape, "stype": _NUMPY, "_place": p})
            for p in self.places
        ]

    @functools.cached_property
    def runs(self) -> list[tuple[np.dtype[Any], int, int]]:
        """Neighbours of the same dtype as one array: dtype, offset and number of elements."""
        runs = []
        arrays = zip(self.places, self.ends, strict=True)
        for dtype, group in itertools.groupby(arrays, lambda array: array[0].dtype):
            neighbours = list(group)
            begin = neighbours[0][0].offset
            end = neighbours[-1][1]
            runs.append((dtype, begin, (end - begin) // dtype.itemsize))
        return runs


_layout_of = functools.lru_cache(maxsize=256)(Layout)


NewMemory = Callable[[Layout], AnyArray]
"""Returns memory (uint8) of at least this layout's size, with zeros between the arrays."""


@dataclass(slots=True, eq=False)
class Flat:
    """The memory of a contiguous record.

    `memory` (uint8) may be longer than the layout. `arrays` are those of the record when it was
    created. `new_memory` allocates memory of the same kind for another record.
    """

    layout: Layout
    memory: AnyArray
    arrays: Mapping[str, Array]
    new_memory: NewMemory | None

    @property
    def bytes(self) -> AnyArray:
        """The memory of the arrays as uint8."""
        # Not a slice: numpy would skip `memory` and keep only its owner alive.
        return np.ndarray(self.layout.num_bytes, np.uint8, self.memory)

    def runs(self) -> dict[str, AnyArray]:
        """Return neighbours of the same dtype as one array; the gaps between them hold zeros."""
        return {
            str(offset): np.ndarray(count, dtype, self.memory, offset)
            for dtype, offset, count in self.layout.runs
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled or copied record has plain arrays


def flat_record(
    layout: Layout,
    memory: AnyArray | None = None,
    new_memory: NewMemory | None = None,
    kind: type[ArrayView] = ArrayView,
) -> ArrayRecord:
    """Return a record of views on one piece of memory (uint8), which is allocated by default.

    `new_memory` allocates it, and `flat_like` uses it again. `kind` is the class of the arrays.
    """
    if memory is None:
        memory = (new_memory or _own_memory)(layout)
    arrays: dict[str, Array] = {}
    for name, attributes in layout.attributes:  # faster than calls of `kind`
        arrays[name] = view = kind.__new__(kind)
        view.__dict__.update(attributes)
        view.__dict__["_memory"] = memory
    record = record_of(arrays)
    record.__dict__[_FLAT] = Flat(layout, memory, arrays, new_memory)
    return record


def flat_like(
    record: ArrayRecord, layout: Layout | None = None, kind: type[ArrayView] = ArrayView
) -> ArrayRecord:
    """Return an uninitialised record in the same kind of memory as another record.

    On the local grid, the global model of an order is in shared memory, from which a reply is sent
    without a copy. The layout is that of `record` by default. `kind` is the class of the arrays.
    """
    flat = flat_of(record)
    kinds = ((name, array.dtype, tuple(array.shape)) for name, array in record.items())
    layout = layout or (flat.layout if flat else Layout.of(kinds))
    return flat_record(layout, new_memory=flat.new_memory if flat else None, kind=kind)


def flat_of(record: ArrayRecord) -> Flat | None:
    """Return the memory of a contiguous record; None for other records and changed ones."""
    flat: Flat | None = record.__dict__.get(_FLAT)
    if flat is None or list(record) != list(flat.arrays):
        return None
    return flat if all(map(operator.is_, record.values(), flat.arrays.values())) else None


class FlatTensors(Mapping[str, AnyArray]):
    """The tensors of a contiguous record by name, without a copy. The record must not change."""

    def __init__(self, record: ArrayRecord, flat: Flat) -> None:
        self._record, self.flat = record, flat

    def __getitem__(self, name: str) -> AnyArray:
        return elements_of(self._record[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self.flat.arrays)


def tensors_of(record: ArrayRecord) -> Mapping[str, AnyArray]:
    """Return a record's tensors by name; `FlatTensors` if it is contiguous."""
    flat = flat_of(record)
    if flat is not None:
        return FlatTensors(record, flat)
    return {name: elements_of(array) for name, array in record.items()}


def common_runs(*models: Mapping[str, AnyArray]) -> Sequence[Mapping[str, AnyArray]]:
    """Return each model as a few long arrays if all are contiguous with the same layout.

    Elementwise operations are faster on these. Otherwise the models are returned as they are.
    """
    flats = [model.flat for model in models if isinstance(model, FlatTensors)]
    if len(flats) < len(models) or any(flat.layout != flats[0].layout for flat in flats):
        return models
    return [flat.runs() for flat in flats]


def _own_memory(layout: Layout) -> AnyArray:
    memory = np.zeros(layout.num_bytes + ALIGNMENT, np.uint8)
    address: int = memory.__array_interface__["data"][0]
    return memory[-address % ALIGNMENT :]
