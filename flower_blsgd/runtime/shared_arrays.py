"""Messages between our own processes: small things pickled, arrays in shared memory.

The records of a message are pickled as they are, but for the arrays in them: of these only the
place in a shared block is written. Both ends are processes of one run, on one machine, started by
one another; nothing is unpickled that came from anywhere else.
"""

import functools
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from ..array_view import ArrayView, PrivateArray, record_of
from .array_memory import contiguous, is_plain, memory_of
from .shared_block import Block, Placement, Pool, view

_VIEWS = "blsgd_accepts_views"

_INLINE_BYTES = 4096
"""Records smaller than this are pickled: a block would be a page at least."""


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
        self._placed: dict[int, tuple[ArrayRecord, tuple[Any, ...], Placement]] = {}

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
            memories = {name: memory_of(array) for name, array in record.items()}
            shared = {name: memory for name, memory in memories.items() if memory is not None}
            if sum(memory.nbytes for memory in shared.values()) < _INLINE_BYTES:
                return None
            placement = self._pool.place(list(shared.values()))
            layout = tuple(
                (name, record[name].dtype, memory.shape, offset)
                for (name, memory), offset in zip(shared.items(), placement.offsets, strict=True)
            )
            others = {name: array for name, array in record.items() if name not in shared}
            order = tuple(record) if others else ()
            # As bytes, so that it is pickled once and looked at once.
            reference = (placement.block.number, pickle.dumps(layout), others, order)
            self._placed[id(record)] = (record, reference, placement)
        _, reference, placement = self._placed[id(record)]
        placements[id(record)] = placement
        return reference


class _Pickler(pickle.Pickler):
    def __init__(
        self,
        buffer: io.BytesIO,
        reference: Callable[[ArrayRecord, dict[int, Placement]], Any],
        placements: dict[int, Placement],
    ) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._reference, self._placements = reference, placements

    def persistent_id(self, content: object) -> Any:
        """Name the place of a record's arrays; None pickles everything else as it is."""
        if type(content) is ArrayRecord and content:
            return self._reference(content, self._placements)
        return None


def unpack(payload: bytes, blocks: Mapping[int, Block], views: bool) -> Any:
    """Return the object of a parcel.

    Parameters
    ----------
    payload : bytes
        Of the parcel.
    blocks : mapping of int to Block
        The sender's blocks by number, mapped here.
    views : bool
        Whether arrays stay in shared memory, or are copied out of it.
    """
    return _Unpickler(io.BytesIO(payload), blocks, views).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, blocks: Mapping[int, Block], views: bool) -> None:
        super().__init__(buffer)
        self._blocks, self._views = blocks, views
        self._tensors: dict[SharedTensor, Any] = {}

    def persistent_load(self, reference: Any) -> Any:
        """Return the record, or the shipped tensor, at this place."""
        if isinstance(reference, SharedTensor):
            # What was one tensor stays one.
            if reference not in self._tensors:
                self._tensors[reference] = self._tensor(reference)
            return self._tensors[reference]
        number, layout, others, order = reference
        lease = self._blocks[number].lease()
        arrays: dict[str, Array] = {}
        for name, dtype, shape, offset in _layout(layout):
            memory = view(lease, offset, dtype, shape)
            arrays[name] = (
                ArrayView(memory, dtype) if self._views else PrivateArray(memory.copy(), dtype)
            )
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
def _layout(layout: bytes) -> Any:
    return pickle.loads(layout)


def share_views(record: ArrayRecord, pool: Pool) -> ArrayRecord | None:
    """Return the record with its views in shared memory; None if not all of it are views."""
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
