"""Messages between our own processes: small things pickled, arrays in shared memory.

The records of a message are pickled as they are, but for the arrays in them: of these only the
place in a shared block is written. Both ends are processes of one run, on one machine, started by
one another; nothing is unpickled that came from anywhere else.
"""

import copyreg
import functools
import io
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from ..array_view import ArrayView, PrivateArray, record_of
from ..flat_record import Flat, Layout, NewMemory, flat_of, flat_record
from .array_memory import contiguous, is_plain, memory_of
from .shared_block import Block, view
from .shared_pool import Placement, Pool

_VIEWS = "blsgd_accepts_views"

_INLINE_BYTES = 4096
"""Records smaller than this travel in the pipe: a block would be a page at least."""

_Placed = tuple[tuple[Any, ...], Placement | None]
"""What stands for a record in the pipe, and where its arrays are if not there."""


@dataclass
class Parcel:
    """An object, ready to be sent.

    Parameters
    ----------
    payload : bytes
        The pickled object.
    placements : list of Placement
        The arrays that it refers to; they stay where they are while the parcel lives.
    """

    payload: bytes
    placements: list[Placement] = field(default_factory=list)

    @property
    def blocks(self) -> dict[int, Block]:
        """The blocks that the receiver must have, by number."""
        return {placement.block.number: placement.block for placement in self.placements}


@dataclass(frozen=True)
class SharedTensor:
    """Where a tensor, or an array, of a shipped object is."""

    number: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    is_torch: bool


class Packer:
    """Packs objects that belong together; a record that several of them share is placed once.

    Parameters
    ----------
    pool : Pool
        Where arrays are put.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._placed: dict[int, tuple[ArrayRecord, tuple[Any, ...], Placement | None]] = {}

    def pack(self, content: object) -> Parcel:
        """Return the object, ready to be sent.

        Raises
        ------
        UsageError
            If there is not enough memory.
        Exception
            Whatever pickling raises.
        """
        placements: dict[int, Placement] = {}
        buffer = io.BytesIO()
        _Pickler(buffer, self._reference, placements).dump(content)
        return Parcel(buffer.getvalue(), list(placements.values()))

    def _reference(self, record: ArrayRecord, placements: dict[int, Placement]) -> Any:
        if id(record) not in self._placed:
            flat = flat_of(record)
            placed = self._array_by_array(record) if flat is None else self._in_one_piece(flat)
            if placed is None:
                return None
            self._placed[id(record)] = (record, *placed)
        _, reference, placement = self._placed[id(record)]
        if placement is not None:
            placements[id(record)] = placement
        return reference

    def _in_one_piece(self, flat: Flat) -> _Placed:
        if flat.layout.num_bytes < _INLINE_BYTES:
            return (None, _pickled(flat.layout), flat.bytes.tobytes()), None
        placement = self._pool.place_flat(flat)
        base = placement.offsets[0]
        return (placement.block.number, _pickled(flat.layout), base), placement

    def _array_by_array(self, record: ArrayRecord) -> _Placed | None:
        memories = {name: memory_of(array) for name, array in record.items()}
        shared = {name: memory for name, memory in memories.items() if memory is not None}
        small = sum(memory.nbytes for memory in shared.values()) < _INLINE_BYTES
        if small and len(shared) < len(record):
            return None
        others = {name: array for name, array in record.items() if name not in shared}
        kinds = [(name, record[name].dtype, memory.shape) for name, memory in shared.items()]
        if others:
            placement: Placement | None = self._pool.place(list(shared.values()))
        else:
            placement = None if small else self._pool.found(list(shared.values()))
        if placement is None:  # the receiver may as well have it in one piece
            new_memory = None if small else self._pool.new_memory
            copied = flat_record(Layout.of(kinds), new_memory=new_memory)
            for array, memory in zip(copied.values(), shared.values(), strict=True):
                array.numpy()[...] = memory
            flat = flat_of(copied)
            assert flat is not None
            return self._in_one_piece(flat)
        layout = tuple(
            (*kind, offset) for kind, offset in zip(kinds, placement.offsets, strict=True)
        )
        order = tuple(record) if others else ()
        # As bytes, so that it is pickled once and looked at once.
        return (placement.block.number, pickle.dumps(layout), others, order), placement


class _Pickler(pickle.Pickler):
    """Writes a record's place instead of its arrays.

    By a table of types, not by `persistent_id`, which is asked of every text and number.
    """

    def __init__(
        self,
        buffer: io.BytesIO,
        reference: Callable[[ArrayRecord, dict[int, Placement]], Any],
        placements: dict[int, Placement],
    ) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)

        def reduce(record: ArrayRecord) -> Any:
            found = reference(record, placements) if record else None
            if found is None:
                return record.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return _record_at, (found,)

        self.dispatch_table = {**copyreg.dispatch_table, ArrayRecord: reduce}


_unpacking = threading.local()
"""Who reads a parcel in this thread."""


def _record_at(reference: Any) -> ArrayRecord:
    unpickler: _Unpickler = _unpacking.unpickler
    return unpickler.record(reference)


@functools.lru_cache(maxsize=256)
def _pickled(layout: Layout) -> bytes:
    return pickle.dumps(layout)


def unpack(
    payload: bytes,
    blocks: Mapping[int, Block],
    views: bool,
    new_memory: NewMemory | None = None,
) -> Any:
    """Return the object of a parcel.

    Parameters
    ----------
    payload : bytes
        Of the parcel.
    blocks : mapping of int to Block
        The sender's blocks by number, mapped here.
    views : bool
        Whether `numpy` of an array is its shared memory, or a copy of it.
    new_memory : callable, optional
        Where a reply to it is best put, see `flat_like`.
    """
    outer = getattr(_unpacking, "unpickler", None)
    _unpacking.unpickler = _Unpickler(io.BytesIO(payload), blocks, views, new_memory)
    try:
        return _unpacking.unpickler.load()
    finally:
        _unpacking.unpickler = outer


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        buffer: io.BytesIO,
        blocks: Mapping[int, Block],
        views: bool,
        new_memory: NewMemory | None,
    ) -> None:
        super().__init__(buffer)
        self._blocks, self._views, self._new_memory = blocks, views, new_memory
        self._tensors: dict[SharedTensor, Any] = {}

    def persistent_load(self, reference: Any) -> Any:
        """Return the shipped tensor at this place; what was one tensor stays one."""
        if reference not in self._tensors:
            self._tensors[reference] = self._tensor(reference)
        return self._tensors[reference]

    def record(self, reference: Any) -> ArrayRecord:
        """Return the record at this place."""
        number, layout, *more = reference
        kind = ArrayView if self._views else PrivateArray
        if number is None:
            arrived = np.frombuffer(bytearray(more[0]), np.uint8)
            return flat_record(_unpickled(layout), (arrived, 0), kind=kind)
        lease = self._blocks[number].lease()
        # A private array is a copy each time that it is asked for, and not before.
        lease.flags.writeable = self._views
        if len(more) == 1:
            memory = lease, more[0]
            return flat_record(_unpickled(layout), memory, self._new_memory, kind)
        others, order = more
        arrays: dict[str, Array] = {
            name: kind(view(lease, offset, dtype, shape), dtype)
            for name, dtype, shape, offset in _unpickled(layout)
        }
        if others:
            arrays |= others
            arrays = {name: arrays[name] for name in order}
        return record_of(arrays)

    def _tensor(self, place: SharedTensor) -> Any:
        lease = self._blocks[place.number].copy_on_write().lease()
        memory = view(lease, place.offset, place.dtype, place.shape)
        if not place.is_torch:
            return memory
        import torch

        return torch.from_numpy(memory)


@functools.lru_cache(maxsize=256)
def _unpickled(layout: bytes) -> Any:
    return pickle.loads(layout)


def share_views(record: ArrayRecord, pool: Pool) -> ArrayRecord | None:
    """Return the record with its views in shared memory; None if not all of it are views."""
    flat = flat_of(record)
    if flat is not None and pool.holds(flat):
        return record
    views = {name: array for name, array in record.items() if isinstance(array, ArrayView)}
    if not record or len(views) < len(record):
        return None
    if not all(is_plain(array.memory) for array in views.values()):
        return None
    memories = [contiguous(array.memory) for array in views.values()]
    placement = pool.place(memories)
    places = zip(views.items(), memories, placement.offsets, strict=True)
    return record_of(
        {
            # Of the same class: a PrivateArray stays one.
            name: type(array)(view(placement.lease, offset, memory.dtype.str, memory.shape))
            for (name, array), memory, offset in places
        }
    )


def accept_views(app: ClientApp) -> None:
    """Let a ClientApp receive arrays that are views on shared memory, instead of copies.

    It must neither write to them nor keep them beyond the call, except in its own copies: a
    view that is kept keeps its block from being used again.
    """
    app.__dict__[_VIEWS] = True


def takes_views(app: ClientApp) -> bool:
    """Whether `accept_views` was called for this app."""
    return bool(app.__dict__.get(_VIEWS))
