"""Frames of a stream: Flower's messages, each followed by the elements of its arrays.

A frame is a message in Flower's own protobuf format, with arrays without data, followed by the
elements of these arrays at aligned offsets. gRPC carries a frame as several messages, which the
receiver copies into place. Nothing is pickled, and lengths are checked before memory is allocated.
"""

import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from ...devices.machine import free_bytes
from ...flower.array_records import ALIGNMENT, PrivateArray
from ...flower.internals import ProtoMessage, make_message, message_from_proto, message_to_proto
from .encoded_arrays import (
    CHUNK_BYTES,
    Broadcast,
    Bytes,
    EncodedRecord,
    FrameArrays,
    FrameError,
    Tensors,
    decode_arrays,
    encode_arrays,
    kind_of,
    plain_arrays,
    rounded_changes,
    taken_out,
)

LONGEST_BODY_BYTES = 1 << 36
LONGEST_HEADER_BYTES = 1 << 26
"""Size of a message without the elements of its arrays. Python objects need many times as much."""

_LONGEST_METADATA_BYTES = 1 << 16
_SMALL_BYTES = 16 << 20

_PREFIX = struct.Struct("<QQ")  # the bytes of the frame, and those of its protobuf


# --- frames -------------------------------------------------------------------------------------


def frame_of(
    message: Message, records: Mapping[str, EncodedRecord], held: dict[str, int] | None = None
) -> list[bytes]:
    """Return a message as the parts of a frame.

    `held` has the versions that the receiver holds, by the name of the record, and is updated.
    FrameError if the message is too long without its arrays.
    """
    held = {} if held is None else held
    readable = {n: not r.version or held.get(n, 0) == r.version - 1 for n, r in records.items()}
    versions = {name: record.version for name, record in records.items()}
    records = {n: record if readable[n] else record.whole for n, record in records.items()}
    content = None
    if message.has_content():
        content = RecordDict(
            {
                name: ArrayRecord() if name in records else record
                for name, record in message.content.items()
            }
        )
    error = message.error if message.has_error() else None
    proto = message_to_proto(make_message(message.metadata, content, error))
    sent = []
    for item in proto.content.items:
        if item.key in records:
            sent.append(records[item.key])
            item.array_record.MergeFromString(sent[-1].description)
    header = proto.SerializeToString()
    if len(header) > LONGEST_HEADER_BYTES:
        raise FrameError(
            f"a message has {len(header)} bytes without its arrays, and a stream carries at most "
            f'{LONGEST_HEADER_BYTES}; put them into an ArrayRecord, or use transport = "messages"'
        )
    held.update(versions)
    elements = [part for record in sent for part in record.elements]
    first_bytes = _aligned(_PREFIX.size + len(header))
    prefix = _PREFIX.pack(first_bytes + sum(map(len, elements)), len(header))
    first = (prefix + header).ljust(first_bytes, b"\0")
    if elements and first_bytes + len(elements[0]) <= CHUNK_BYTES:
        first += elements.pop(0)  # a gRPC message costs more than this copy
    return [first, *elements]


def acknowledgement_of(reply: Message) -> list[bytes]:
    """Return the frame that acknowledges a reply: its metadata without content."""
    return frame_of(make_message(reply.metadata, RecordDict()), {})


def chunks_of(frame: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the gRPC messages that carry a frame."""
    for part in frame:
        for first in range(0, len(part), CHUNK_BYTES):
            yield part[first : first + CHUNK_BYTES]


def read_frames(chunks: Iterable[bytes]) -> Iterator[tuple[Message, FrameArrays]]:
    """Read frames from gRPC messages: messages, and their arrays, which `decode_arrays` puts in.

    FrameError if the bytes are not frames, or a frame is too long or larger than the free memory.
    """
    incoming = iter(chunks)
    for first in incoming:
        header_bytes, frame = _begin(first)
        filled = 0
        for chunk in itertools.chain([first], incoming):
            end = filled + len(chunk)
            if end > len(frame):
                raise FrameError(f"more than {len(frame)} bytes arrived for a frame of that size")
            frame.data[filled:end] = chunk
            filled = end
            if filled == len(frame):
                break
        else:
            return
        header_end = _PREFIX.size + header_bytes
        try:
            proto = ProtoMessage.FromString(frame[_PREFIX.size : header_end].tobytes())
            if proto.metadata.ByteSize() > _LONGEST_METADATA_BYTES:
                raise FrameError(f"its metadata has {proto.metadata.ByteSize()} bytes")
            described = {
                item.key: taken_out(item.array_record)
                for item in proto.content.items
                if item.HasField("array_record")
            }
            message = message_from_proto(proto)
        except FrameError:
            raise
        except Exception as error:  # protobuf's own, and any exception of Flower
            raise FrameError(f"a frame's message cannot be read: {error}") from None
        elements = frame[_aligned(header_end) :]
        if elements.size and not message.has_content():
            raise FrameError(f"{elements.size} bytes of a frame belong to no array")
        yield message, FrameArrays(described, elements)
        del message, frame, elements


def _begin(chunk: bytes) -> tuple[int, Bytes]:
    """Return the length of the protobuf of a frame, and memory for the frame."""
    if len(chunk) < _PREFIX.size:
        raise FrameError(f"a frame cannot begin with {len(chunk)} bytes")
    body_bytes, header_bytes = _PREFIX.unpack_from(chunk)
    # For a small frame, the check would take longer than reading it.
    free = free_bytes() if body_bytes >= _SMALL_BYTES else None
    if body_bytes > LONGEST_BODY_BYTES or (free is not None and body_bytes > free):
        raise FrameError(f"a frame of {body_bytes} bytes is too large")
    if header_bytes > LONGEST_HEADER_BYTES or _aligned(_PREFIX.size + header_bytes) > body_bytes:
        raise FrameError(f"a message of {header_bytes} bytes does not fit into its frame")
    return header_bytes, np.empty(body_bytes, np.uint8)


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT


# --- messages and replies -----------------------------------------------------------------------


class EncodedMessage(NamedTuple):
    """A message to a node with its encoded records: the arguments of `frame_of`."""

    message: Message
    records: Mapping[str, EncodedRecord]


def encode_messages(
    messages: Sequence[Message], broadcasts: dict[str, Broadcast], wire_dtype: str
) -> list[EncodedMessage]:
    """Encode messages that are sent together. A record in several messages is encoded once.

    `broadcasts` has the models that all nodes hold, by the name of the record, and is updated. With
    `wire_dtype` ``"float32"`` models travel unchanged. FrameError as in `plain_arrays`.
    """
    shared: dict[tuple[str, int], EncodedRecord] = {}

    def encoded(name: str, record: ArrayRecord) -> EncodedRecord:
        if (name, id(record)) not in shared:
            if wire_dtype == "float32" or any(name == other for other, _ in shared):
                # Further records of this name are for single nodes, and travel unchanged.
                sent = encode_arrays(plain_arrays(record))
            else:
                sent = broadcasts.setdefault(name, Broadcast(wire_dtype)).next(record)
            shared[name, id(record)] = sent
        return shared[name, id(record)]

    records = (message.content.array_records.items() for message in messages)
    encodings = [{name: encoded(name, record) for name, record in of_one} for of_one in records]
    return [EncodedMessage(*pair) for pair in zip(messages, encodings, strict=True)]


def encode_reply(
    reply: Message, received: Mapping[str, Tensors], carried: dict[str, Tensors], wire_dtype: str
) -> list[bytes]:
    """Return the reply to a message as a frame; FrameError as in `plain_arrays`.

    `received` has the models of the message, which changes are relative to, and `carried` the
    errors of the previous changes, both by the name of the record. `carried` is updated. With
    `wire_dtype` ``"float32"`` models travel unchanged.
    """
    records = {}
    for name, record in reply.content.array_records.items() if reply.has_content() else ():
        tensors = plain_arrays(record)
        changes = None
        if wire_dtype != "float32" and name in received:
            errors = carried.pop(name, {})
            errors = {k: e for k, e in errors.items() if kind_of(e) == kind_of(tensors.get(k))}
            changes, carried[name] = rounded_changes(tensors, received[name], errors, wire_dtype)
        records[name] = encode_arrays(tensors, changes, wire_dtype)
    return frame_of(reply, records)


def decode_reply(reply: Message, arrays: FrameArrays, sent: Message) -> Message:
    """Return a reply from `read_frames` as the reply to the message object that was sent.

    Its arrays refer to the frame's memory, and are copied when read. Changes are added to the true
    model that was sent, so the rounding error of the node's model does not enter the average.

    FrameError if the arrays cannot be read.
    """
    if reply.has_error():
        return Message(reply.error, reply_to=sent)
    models = sent.content.array_records
    decode_arrays(
        reply, arrays, lambda name: plain_arrays(models.get(name, ArrayRecord())), PrivateArray
    )
    return Message(reply.content, reply_to=sent)
