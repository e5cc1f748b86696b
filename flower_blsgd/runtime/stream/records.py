"""Flower records as parts of a frame's body, and back.

Settings and figures travel as Flower serialises them. The arrays of a record are one run of
bytes, in the record's order, each on an aligned place: Flower's own wire spends milliseconds on
every single array.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ...array_view import AnyArray, ArrayView, PrivateArray, record_of
from ..array_memory import memory_of
from .frames import Bytes, FrameError, cut

_ALIGNMENT = 64
_PLAIN: dict[str, Any] = {"config": ConfigRecord, "metrics": MetricRecord}


@dataclass(frozen=True)
class EncodedRecord:
    """A record, ready to be sent to any number of receivers.

    Parameters
    ----------
    description : dict
        What the header says of it; ``bytes`` is its length in the body, and what else is needed
        to read it.
    pieces : list of bytes
        Its part of the body.
    """

    description: Mapping[str, Any]
    pieces: list[bytes] = field(repr=False)


def encode_record(record: ArrayRecord | ConfigRecord | MetricRecord) -> EncodedRecord:
    """Return a record's description and bytes."""
    if isinstance(record, ArrayRecord):
        return encode_arrays(record)
    kind = "config" if isinstance(record, ConfigRecord) else "metrics"
    data = record.deflate()
    return EncodedRecord({"kind": kind, "bytes": len(data)}, cut([memoryview(data)]))


def encode_arrays(record: ArrayRecord) -> EncodedRecord:
    """Return the arrays of a record as one run of bytes."""
    layout: list[list[Any]] = []
    parts: list[memoryview] = []
    end = 0
    for name, array in record.items():
        memory = memory_of(array)
        if memory is None:  # serialised in a way of its own, which its receiver knows
            data = memoryview(array.data)
            layout.append([name, array.dtype, list(array.shape), array.stype, len(data)])
        else:
            data = memory.reshape(-1).view(np.uint8).data
            layout.append([name, memory.dtype.str, list(memory.shape)])
        parts += [data, _padding(len(data))]
        end += len(data) + len(parts[-1])
    return EncodedRecord({"kind": "arrays", "bytes": end, "layout": layout}, cut(parts))


ReadArrays = Callable[[str, Mapping[str, Any], Bytes], ArrayRecord]
"""(name, description, bytes) -> record"""


def decode_records(
    descriptions: Mapping[str, Any], body: Bytes, read_arrays: ReadArrays
) -> RecordDict:
    """Read all records of a message.

    Parameters
    ----------
    descriptions : mapping of str to dict
        As `EncodedRecord.description`, by the record's name, in the order of the body.
    body : ndarray of uint8
        The frame's body.
    read_arrays : callable
        Reads a record that is neither settings nor figures.

    Raises
    ------
    FrameError
        If they are not what was promised.
    """
    records = RecordDict()
    first = 0
    for name, description in descriptions.items():
        length = description.get("bytes") if isinstance(description, dict) else None
        if not isinstance(length, int) or not 0 <= length <= len(body) - first:
            raise FrameError(f"record {name!r} is not in its frame")
        part = body[first : first + length]
        first += length
        kind = description.get("kind")
        if kind in ("arrays", "change"):
            records[name] = read_arrays(name, description, part)
        elif kind in tuple(_PLAIN):  # in a tuple, since it may be anything
            try:
                records[name] = _PLAIN[kind].inflate(part.tobytes())
            except Exception as error:  # protobuf has errors of its own
                raise FrameError(f"record {name!r} cannot be read: {error}") from None
        else:
            raise FrameError(f"record {name!r} is of no known kind")
    return records


def decode_arrays(layout: Any, part: Bytes, views: bool) -> ArrayRecord:
    """Return the record of arrays that lie in these bytes.

    Parameters
    ----------
    layout : Any
        As in the description.
    part : ndarray of uint8
        The record's bytes.
    views : bool
        Whether `numpy` of these arrays returns this very memory; else a copy of it.

    Raises
    ------
    FrameError
        If they do not.
    """
    view_type = ArrayView if views else PrivateArray
    arrays: dict[str, Array] = {}
    at = 0
    try:
        for name, dtype_name, shape, *foreign in layout:
            if foreign:
                stype, length = foreign
                data = part[at : at + length].tobytes()
                if length < 0 or len(data) != length:
                    raise FrameError(f"array {name!r} is not in its frame")
                arrays[str(name)] = Array(dtype_name, tuple(shape), stype, data)
            else:
                memory = _array_at(part, at, dtype_name, shape)
                length = memory.nbytes
                arrays[str(name)] = view_type(memory)
            at += length + len(_padding(length))
    except (TypeError, ValueError, OverflowError, SyntaxError) as error:  # of dtypes and shapes
        raise FrameError(f"the arrays of a frame cannot be read: {error}") from None
    return record_of(arrays)


def _array_at(part: Bytes, at: int, dtype_name: str, shape: list[int]) -> AnyArray:
    dtype = np.dtype(dtype_name)
    if dtype.hasobject or any(size < 0 for size in shape):
        raise FrameError(f"there is no array of {dtype_name} with shape {shape}")
    length = dtype.itemsize * int(np.prod(shape, dtype=object))
    if at + length > len(part):
        raise FrameError(f"an array of {length} bytes is not in its frame")
    return part[at : at + length].view(dtype).reshape(shape)


def _padding(length: int) -> memoryview:
    return _ZEROS[: -length % _ALIGNMENT]


_ZEROS = memoryview(bytes(_ALIGNMENT))
