"""Copies of a model between a contiguous record on the host and an accelerator, in pieces.

A piece is gathered in one buffer on the device. So a small model moves in one copy, and a large one
needs little more memory than its own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..flower.array_records import Flat, Layout, Place

PIECE_BYTES = 1 << 25
"""Largest buffer of a piece; a larger tensor is copied alone, without a buffer."""


def copy_to_device(flat: Flat, targets: Mapping[str, Tensor]) -> None:
    """Overwrite tensors on an accelerator with those of a contiguous record, by name.

    Returns when the record's memory may be reused.
    """
    host = tensor_on(flat.bytes)
    for places, begin, end in _pieces(flat.layout):
        # The last copy waits for the device, and so for all copies before it.
        non_blocking = end < flat.layout.num_bytes
        part = host[begin:end]
        if len(places) == 1:
            targets[places[0].name].copy_(_views(part, places)[0], non_blocking=non_blocking)
        else:
            own = [targets[place.name] for place in places]
            part = part.to(_device_of(targets), non_blocking=non_blocking)
            _copy_each(own, _views(part, places))


def copy_to_host(sources: Mapping[str, Tensor], flat: Flat) -> None:
    """Overwrite a contiguous record with tensors on an accelerator, by name.

    Between its arrays, the record has zeros.
    """
    host = tensor_on(flat.bytes)
    device = _device_of(sources)
    for places, begin, end in _pieces(flat.layout):
        non_blocking = end < flat.layout.num_bytes
        part = host[begin:end]
        if len(places) == 1:
            _views(part, places)[0].copy_(sources[places[0].name], non_blocking=non_blocking)
        else:
            gathered = torch.zeros(end - begin, dtype=torch.uint8, device=device)
            _copy_each(_views(gathered, places), [sources[p.name] for p in places])
            part.copy_(gathered, non_blocking=non_blocking)


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others on the same device, with one launch for each pair of dtypes."""
    by_dtype: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        own, theirs = by_dtype.setdefault((target.dtype, source.dtype), ([], []))
        own.append(target)
        theirs.append(source)
    for own, theirs in by_dtype.values():
        torch._foreach_copy_(own, theirs)


def tensor_on(array: npt.NDArray[Any]) -> Tensor:
    """Return a tensor that shares an array's memory; a copy if the array is read-only.

    torch warns about read-only arrays, such as some views of shared memory.
    """
    return torch.from_numpy(np.require(array, requirements="W"))


def _pieces(layout: Layout) -> Iterator[tuple[list[Place], int, int]]:
    """Yield the places of the tensors of each piece, and the range of its bytes."""
    piece: list[Place] = []
    begin = 0
    for place, end in zip(layout.places, layout.ends, strict=True):
        if piece and end - begin > PIECE_BYTES:
            yield piece, begin, place.offset
            piece = []
            begin = place.offset
        piece.append(place)
    if piece:
        yield piece, begin, layout.num_bytes


def _views(part: Tensor, places: Sequence[Place]) -> list[Tensor]:
    """Return the tensors of a piece as views of its bytes."""
    begin = places[0].offset
    return [
        part[offset - begin : offset - begin + dtype.itemsize * math.prod(shape)]
        .view(getattr(torch, dtype_name))
        .view(shape)
        for _, dtype_name, dtype, shape, offset in places
    ]


def _device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    return next(iter(tensors.values())).device
