"""Records whose arrays lie one behind the other in one piece of memory.

A model of a hundred small tensors is then copied, checked and averaged as one array of each
dtype, and its place is told in one line.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from .array_view import AnyArray, ArrayView, record_of

ALIGNMENT = 64
"""Bytes: a cache line, and what vector instructions like."""

_FLAT = "_blsgd_flat"

Memory = tuple[AnyArray, int]
"""Bytes, and where in them it begins."""

NewMemory = Callable[["Layout"], Memory]


@dataclass(frozen=True)
class Layout:
    """Where each array is.

    Parameters
    ----------
    names, dtypes : tuple of str
        Of the arrays, in the record's order; dtypes as a Flower array names them.
    shapes : tuple of tuple of int
        Of the arrays.
    offsets : tuple of int
        Bytes from the beginning of the memory.
    num_bytes : int
        Of the memory.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, kinds: Iterable[tuple[str, str, tuple[int, ...]]]) -> "Layout":
        """Return the layout of arrays with these names, dtypes and shapes."""
        return _layout_of(tuple(kinds))

    def __reduce__(self) -> tuple[Any, ...]:  # without what is derived
        return Layout, (self.names, self.dtypes, self.shapes, self.offsets, self.num_bytes)

    @functools.cached_property
    def places(self) -> list[tuple[str, str, np.dtype[Any], tuple[int, ...], int]]:
        """Name, name of the dtype, dtype, shape and offset of each array."""
        dtypes = map(np.dtype, self.dtypes)
        return list(zip(self.names, self.dtypes, dtypes, self.shapes, self.offsets, strict=True))

    @functools.cached_property
    def runs(self) -> list[tuple[np.dtype[Any], int, int]]:
        """Neighbours of one dtype as one array: dtype, offset and number of elements."""
        runs: list[tuple[np.dtype[Any], int, int]] = []
        for (_, _, dtype, _, offset), end in zip(self.places, self._ends, strict=True):
            begin = offset
            if runs and runs[-1][0] == dtype and (end - runs[-1][1]) % dtype.itemsize == 0:
                begin = runs.pop()[1]
            runs.append((dtype, begin, (end - begin) // dtype.itemsize))
        return runs

    @functools.cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Bytes that belong to no array, from and to."""
        pairs = zip(self._ends, [*self.offsets[1:], self.num_bytes], strict=True)
        return [(end, start) for end, start in pairs if end < start]

    @property
    def _ends(self) -> list[int]:
        return [
            offset + math.prod(shape) * dtype.itemsize for _, _, dtype, shape, offset in self.places
        ]


@functools.lru_cache(maxsize=256)
def _layout_of(kinds: tuple[tuple[str, str, tuple[int, ...]], ...]) -> Layout:
    offsets, end = [], 0
    for _, dtype, shape in kinds:
        offsets.append(end)
        size = math.prod(shape) * np.dtype(dtype).itemsize
        end += -(-size // ALIGNMENT) * ALIGNMENT
    names, dtypes, shapes = zip(*kinds, strict=True) if kinds else ((), (), ())
    return Layout(names, dtypes, shapes, tuple(offsets), end)


class Flat:
    """The memory of a record that lies in one piece.

    Parameters
    ----------
    layout : Layout
        Where each array is.
    memory : Memory
        The bytes, and where in them the first array is.
    arrays : tuple of Array
        The record's arrays when it was made.
    new_memory : callable, optional
        Where another such record is to be.
    """

    __slots__ = ("arrays", "base", "layout", "memory", "new_memory")

    def __init__(
        self,
        layout: Layout,
        memory: Memory,
        arrays: tuple[Array, ...],
        new_memory: NewMemory | None,
    ) -> None:
        self.layout, self.arrays, self.new_memory = layout, arrays, new_memory
        self.memory, self.base = memory

    @property
    def bytes(self) -> AnyArray:
        """The memory itself, uint8."""
        # Not a slice: of a view of its own class numpy keeps the owner only.
        return np.ndarray(self.layout.num_bytes, np.uint8, self.memory, self.base)

    def runs(self) -> dict[str, AnyArray]:
        """Return neighbours of one dtype as one array each; the gaps between them hold zeros."""
        return {
            str(offset): np.ndarray(count, dtype, self.memory, self.base + offset)
            for dtype, offset, count in self.layout.runs
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a record that is pickled or copied has arrays of its own

    def __deepcopy__(self, memo: Any) -> None:
        return None


def _nothing() -> None:
    return None


def flat_record(
    layout: Layout,
    memory: Memory | None = None,
    new_memory: NewMemory | None = None,
    kind: type[ArrayView] = ArrayView,
) -> ArrayRecord:
    """Return a record of views on a piece of memory.

    Parameters
    ----------
    layout : Layout
        Names, dtypes, shapes and places of the arrays.
    memory : Memory, optional
        Where they are; by default new memory.
    new_memory : callable, optional
        Makes the memory; `flat_like` asks it for more of the same kind.
    kind : type (default: ArrayView)
        Of the arrays.
    """
    if memory is None:
        memory = (new_memory or _own_memory)(layout)
    buffer, base = memory
    ndarray = np.ndarray
    arrays: dict[str, Array] = {
        name: kind(ndarray(shape, dtype, buffer, base + offset), dtype_name)
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
    if layout is None:
        layout = (
            flat.layout
            if flat
            else Layout.of(
                (name, array.dtype, tuple(array.shape)) for name, array in record.items()
            )
        )
    return flat_record(layout, new_memory=flat.new_memory if flat else None)


def flat_of(record: ArrayRecord) -> Flat | None:
    """Return where a record lies; None if it does not lie in one piece, or was changed since."""
    flat: Flat | None = record.__dict__.get(_FLAT)
    if flat is None or len(record) != len(flat.arrays):
        return None
    same = all(map(operator.is_, record.values(), flat.arrays))
    return flat if same and tuple(record) == flat.layout.names else None


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


def _own_memory(layout: Layout) -> Memory:
    memory = np.zeros(layout.num_bytes + ALIGNMENT, np.uint8)
    address: int = memory.__array_interface__["data"][0]
    return memory, -address % ALIGNMENT
