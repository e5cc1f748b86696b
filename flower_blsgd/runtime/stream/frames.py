"""The bytes of a stream: frames, and the Flower records in them.

A frame is one JSON header and a body of any size. gRPC carries it as several messages: the first
holds the header, the others chunks of the body, which the receiver copies into place. Nothing is
pickled, and a length is checked before memory is allocated for it.

The body holds records. Settings and metrics are serialised by Flower. The arrays of a record are
one run of bytes, each at an aligned offset: Flower's own format costs milliseconds for each array.
"""

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ...array_records import AnyArray, memory_of
from ..memory import free_bytes

CHUNK_BYTES = 1 << 20
"""The longest chunk of a body in one gRPC message."""

LONGEST_HEADER_BYTES = 2 << 20
LONGEST_MESSAGE_BYTES = LONGEST_HEADER_BYTES + CHUNK_BYTES + 64
"""gRPC refuses longer messages."""

LONGEST_BODY_BYTES = 1 << 36
_SMALL_BYTES = 16 << 20

_PREFIX = struct.Struct("<4sBIQ")
_MAGIC = b"blsg"
_ALIGNMENT = 64  # bytes
_FLOWER_RECORDS: dict[str, Any] = {"config": ConfigRecord, "metrics": MetricRecord}

Bytes = npt.NDArray[np.uint8]
Tensors = Mapping[str, AnyArray]


class FrameError(ValueError):
    """Received bytes that are no valid frame, record or message."""


class Kind(IntEnum):
    """The purpose of a frame."""

    HELLO = 1
    """The client's first: which messages it has already."""
    WELCOME = 2
    """The server's answer."""
    MESSAGE = 3
    """A Flower message, either way."""


@dataclass(frozen=True)
class Frame:
    """One frame, as it arrived.

    Parameters
    ----------
    kind : Kind
        Its purpose.
    header : mapping
        Decoded JSON.
    body : ndarray of uint8
        Memory that belongs to this frame.
    """

    kind: Kind
    header: Mapping[str, Any]
    body: Bytes = field(repr=False)


def frame_chunks(
    kind: Kind, header: Mapping[str, Any], body: Sequence[Sequence[bytes]] = ()
) -> list[bytes]:
    """Return a frame as gRPC messages.

    Parameters
    ----------
    kind : Kind
        Its purpose.
    header : mapping
        What JSON can hold.
    body : sequence of sequences of bytes
        Parts of the body, each split into chunks already, so that frames can share them.

    Raises
    ------
    FrameError
        If the header is too long: a model of that many tensors cannot be sent.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > LONGEST_HEADER_BYTES:
        raise FrameError(
            f"the description of the tensors takes {len(text)} bytes, more than the "
            f"{LONGEST_HEADER_BYTES} that a stream carries; send fewer, larger tensors"
        )
    chunks = [chunk for part in body for chunk in part]
    first = _PREFIX.pack(_MAGIC, kind, len(text), sum(map(len, chunks))) + text
    taken = 0
    while taken < len(chunks) and len(first) + len(chunks[taken]) <= CHUNK_BYTES // 8:
        first += chunks[taken]  # small ones need no message of their own
        taken += 1
    return [first, *chunks[taken:]]


def split(parts: Iterable[memoryview]) -> list[bytes]:
    """Return the bytes of these parts, one after another, as chunks of a body."""
    chunks: list[bytes] = []
    begun: list[memoryview] = []
    room = CHUNK_BYTES
    for part in parts:
        at = 0
        while at < len(part):
            taken = part[at : at + room]
            begun.append(taken)
            at += len(taken)
            room -= len(taken)
            if not room:
                chunks.append(b"".join(begun))
                begun, room = [], CHUNK_BYTES
    if begun:
        chunks.append(b"".join(begun))
    return chunks


def read_frames(messages: Iterable[bytes]) -> Iterator[Frame]:
    """Yield each frame in gRPC messages when its last byte is there.

    Raises
    ------
    FrameError
        If the bytes are not frames, or one is too long, also for the free memory.
    """
    incoming = iter(messages)
    for message in incoming:
        kind, header, body, chunk = _begin(message)
        filled = 0
        while True:
            end = filled + len(chunk)
            if end > len(body):
                raise FrameError(f"a frame of {len(body)} bytes came with more")
            body.data[filled:end] = chunk
            filled = end
            if filled == len(body):
                break
            following = next(incoming, None)
            if following is None:
                return
            chunk = following
        yield Frame(kind, header, body)
        del body


def _begin(message: bytes) -> tuple[Kind, Mapping[str, Any], Bytes, bytes]:
    """Return a frame's kind, header, memory for its body, and the rest of its first message."""
    if len(message) < _PREFIX.size:
        raise FrameError(f"a frame cannot begin with {len(message)} bytes")
    magic, kind, header_bytes, body_bytes = _PREFIX.unpack_from(message)
    if magic != _MAGIC or kind not in set(Kind):
        raise FrameError("these bytes are no frame")
    if header_bytes > min(LONGEST_HEADER_BYTES, len(message) - _PREFIX.size):
        raise FrameError(f"a header of {header_bytes} bytes is not in its message")
    if body_bytes > LONGEST_BODY_BYTES or not _fits_in_memory(body_bytes):
        raise FrameError(f"a frame of {body_bytes} bytes is more than can be taken")
    text_end = _PREFIX.size + header_bytes
    try:
        header = json.loads(message[_PREFIX.size : text_end])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise FrameError("a frame's header cannot be read")
    return Kind(kind), header, np.empty(body_bytes, np.uint8), message[text_end:]


def _fits_in_memory(num_bytes: int) -> bool:
    if num_bytes < _SMALL_BYTES:
        return True  # asking takes longer than reading it
    free = free_bytes()
    return free is None or num_bytes <= free


@dataclass(frozen=True)
class EncodedRecord:
    """A record, ready to be sent to any number of receivers.

    Parameters
    ----------
    description : dict
        Its entry in the frame's header: its kind, its length in the body as ``bytes``, and what
        else is needed to read it.
    chunks : list of bytes
        Its part of the body.
    """

    description: Mapping[str, Any]
    chunks: list[bytes] = field(repr=False)


def encode_record(record: ArrayRecord | ConfigRecord | MetricRecord) -> EncodedRecord:
    """Return a record's description and bytes; raise `FrameError` as `plain_arrays` does."""
    if isinstance(record, ArrayRecord):
        return encode_arrays(plain_arrays(record))
    kind = "config" if isinstance(record, ConfigRecord) else "metrics"
    data = record.deflate()
    return EncodedRecord({"kind": kind, "bytes": len(data)}, split([memoryview(data)]))


def plain_arrays(record: ArrayRecord) -> Tensors:
    """Return a record's arrays by name: contiguous, and without a copy where that is possible.

    Raises
    ------
    FrameError
        If one is not Flower's serialised form of a numpy array of numbers, times or texts.
    """
    tensors = {}
    for name, array in record.items():
        memory = memory_of(array)
        if memory is None:
            raise FrameError(
                f"array {name!r} ({array.stype}, {array.dtype}) is no numpy array of numbers, "
                'which is all that a stream carries; use transport = "messages"'
            )
        tensors[name] = memory
    return tensors


def encode_arrays(tensors: Tensors) -> EncodedRecord:
    """Return contiguous arrays as one run of bytes."""
    layout = [[name, t.dtype.str, list(t.shape)] for name, t in tensors.items()]
    parts: list[memoryview] = []
    for tensor in tensors.values():
        padding = bytes(-tensor.nbytes % _ALIGNMENT)
        parts += [tensor.reshape(-1).view(np.uint8).data, memoryview(padding)]
    length = sum(map(len, parts))
    return EncodedRecord({"kind": "arrays", "bytes": length, "layout": layout}, split(parts))


def decode_records(
    descriptions: Mapping[str, Any],
    body: Bytes,
    read_arrays: Callable[[str, Mapping[str, Any], Bytes], ArrayRecord],
) -> RecordDict:
    """Read all records of a message.

    Parameters
    ----------
    descriptions : mapping of str to dict
        As `EncodedRecord.description`, by the record's name, in the order of the body.
    body : ndarray of uint8
        The frame's body.
    read_arrays : callable
        Reads a record of arrays, or of changes to arrays, from its name, description and bytes.

    Raises
    ------
    FrameError
        If they do not fit the body, or cannot be read.
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
            continue
        try:
            records[name] = _FLOWER_RECORDS[kind].inflate(part.tobytes())
        except Exception as error:  # no known kind; and protobuf has errors of its own
            raise FrameError(f"record {name!r} cannot be read: {error}") from None
    return records


def decode_arrays(layout: Any, part: Bytes) -> dict[str, AnyArray]:
    """Return the arrays that lie in these bytes, by name; they are views.

    Parameters
    ----------
    layout : Any
        As in the description: name, dtype and shape of each.
    part : ndarray of uint8
        The record's bytes.

    Raises
    ------
    FrameError
        If the layout is none, or leads out of the bytes.
    """
    tensors: dict[str, AnyArray] = {}
    at = 0
    try:
        for name, dtype_name, shape in layout:
            dtype = np.dtype(dtype_name)
            length = dtype.itemsize * math.prod(shape)
            if dtype.hasobject or any(size < 0 for size in shape) or at + length > len(part):
                raise FrameError(f"no array of {dtype} with shape {shape} is in these bytes")
            tensors[str(name)] = part[at : at + length].view(dtype).reshape(shape)
            at += length + -length % _ALIGNMENT
    except (TypeError, ValueError, OverflowError, SyntaxError) as error:  # of dtypes and shapes
        raise FrameError(f"the arrays of a frame cannot be read: {error}") from None
    return tensors
