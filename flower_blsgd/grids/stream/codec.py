"""Frames of a stream: Flower's messages, each followed by the elements of its arrays.

A frame is a message in Flower's own protobuf format, with arrays without data, followed by the
elements of these arrays at aligned offsets. (Flower's own format of an array costs milliseconds.)
gRPC carries a frame as several messages, which the receiver copies into place. Nothing is pickled,
and lengths are checked before memory is allocated.

Models may travel as changes in 16 bits. A change is the difference to a model that both ends hold,
so its few bits describe a small number. The rounding error is added to the next change (error
feedback), so it is delayed and not lost.
"""

import functools
import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Message, RecordDict

from ..array_records import (
    ALIGNMENT,
    AnyArray,
    ArrayView,
    FlatTensors,
    Kind,
    Layout,
    flat_of,
    flat_record,
    is_plain,
    memory_of,
    record_of,
)
from ..flower_internals import (
    ProtoArray,
    ProtoArrayRecord,
    ProtoMessage,
    make_message,
    message_from_proto,
    message_to_proto,
)
from ..machine import free_bytes

CHUNK_BYTES = 1 << 20
"""Size of the longest gRPC message."""

LONGEST_BODY_BYTES = 1 << 36
LONGEST_HEADER_BYTES = 1 << 26
"""Size of a message without the elements of its arrays. Python objects need many times as much."""

_LONGEST_METADATA_BYTES = 1 << 16
_LONGEST_DTYPE, _MOST_DIMENSIONS = 32, 64
_SMALL_BYTES = 16 << 20
_LONGEST_CACHED_BYTES = 1 << 18

_PREFIX = struct.Struct("<QQ")  # the bytes of the frame, and those of its protobuf

Bytes = npt.NDArray[np.uint8]
Tensors = Mapping[str, AnyArray]
WireDtype = Literal["float32", "bfloat16", "float16"]


class FrameError(ValueError):
    """Received bytes that are not a valid frame, or a message that cannot be sent."""


# --- frames -------------------------------------------------------------------------------------


def frame_of(
    message: Message, records: Mapping[str, "EncodedRecord"], held: dict[str, int] | None = None
) -> list[bytes]:
    """Return a message as the parts of a frame.

    `held` has the versions that the receiver holds, by the name of the record, and is updated.
    FrameError if the message is too long without its arrays.
    """
    held = {} if held is None else held
    readable = {n: not r.version or held.get(n, 0) == r.version - 1 for n, r in records.items()}
    held.update({name: record.version for name, record in records.items()})
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


def read_frames(chunks: Iterable[bytes]) -> Iterator[tuple[Message, "FrameArrays"]]:
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
                item.key: _taken_out(item.array_record)
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


# --- arrays -------------------------------------------------------------------------------------

_WHOLE = "numpy.ndarray"
"""Flower's name of its format of arrays. The format of a change is its 16-bit dtype."""


class Described(NamedTuple):
    """The arrays of one record in a frame.

    `layout` has their elements, and `changes` the 16-bit dtype of each array that is a change.
    """

    layout: Layout
    changes: Mapping[str, str]


class FrameArrays(NamedTuple):
    """The arrays of a frame: descriptions by the name of the record, and all elements (uint8)."""

    described: Mapping[str, Described]
    elements: Bytes


@functools.lru_cache(maxsize=64)
def _description_of(kinds: Sequence[Kind], changes: frozenset[str], wire_dtype: str) -> bytes:
    """Return the description of a record: Flower's protobuf of its arrays without data."""
    record = ProtoArrayRecord()
    for name, dtype, shape in kinds:
        form = wire_dtype if name in changes else _WHOLE
        record.items.add(key=name, value=ProtoArray(dtype=dtype, shape=shape, stype=form))
    return bytes(record.SerializeToString())


def _taken_out(record: ProtoArrayRecord) -> Described:
    """Return what a record describes, and empty it.

    Reading it takes longer than copying a small model, and it is the same in every round.
    """
    description = record.SerializeToString()
    record.Clear()
    if len(description) > _LONGEST_CACHED_BYTES:
        return _described.__wrapped__(description)
    return _described(description)


@functools.lru_cache(maxsize=64)
def _described(description: bytes) -> Described:
    """Read a description; FrameError if it is invalid."""
    kinds: dict[str, Kind] = {}
    changes = {}
    for item in ProtoArrayRecord.FromString(description).items:
        name, array = item.key, item.value
        # Limits before numpy parses the dtype, and before the product of the shape.
        if len(array.dtype) > _LONGEST_DTYPE or len(array.shape) > _MOST_DIMENSIONS or array.data:
            raise FrameError("an array of a frame has an invalid description")
        shape = tuple(array.shape)
        try:
            dtype = np.dtype(array.dtype if array.stype == _WHOLE else np.uint16)
        except (TypeError, ValueError, SyntaxError) as error:  # numpy raises all three
            raise FrameError(f"array {name!r} of a frame cannot be read: {error}") from None
        if not is_plain(dtype) or min(shape, default=0) < 0 or name in kinds:
            raise FrameError(f"an array of {dtype} of shape {shape} is not in its frame")
        kinds[name] = name, str(dtype), shape
        if array.stype != _WHOLE:
            if array.stype not in ("bfloat16", "float16") or array.dtype != "float32":
                raise FrameError(f"array {name!r} of a frame is {array.dtype} as {array.stype}")
            changes[name] = array.stype
    return Described(Layout.of(kinds.values()), changes)


@dataclass(frozen=True)
class EncodedRecord:
    """An encoded record: a description of its arrays without data, and their elements.

    `elements` are parts of at most `CHUNK_BYTES`, of which only the first is shorter. `version` is
    the version that a receiver holds afterwards; 0 for a record without versions. A receiver
    without the previous version gets `whole`. `tensors` are the values that it reads.
    """

    description: bytes
    elements: Sequence[bytes] = field(repr=False)
    version: int = 0
    tensors: Tensors = field(default_factory=dict, repr=False)

    @functools.cached_property
    def whole(self) -> "EncodedRecord":
        """The record without changes, for a receiver that lacks the previous version."""
        return encode_arrays(self.tensors)


def plain_arrays(record: ArrayRecord) -> Tensors:
    """Return a record's arrays by name, contiguous, without copies where possible.

    FrameError if one is not Flower's serialised form of a numpy array of numbers, times or texts.
    """
    if flat := flat_of(record):
        return FlatTensors(record, flat)
    tensors = {}
    for name, array in record.items():
        memory = memory_of(array)
        if memory is None:
            raise FrameError(
                f"array {name!r} ({array.stype}, {array.dtype}) is not a numpy array of numbers, "
                'and a stream carries no other arrays; use transport = "messages"'
            )
        tensors[name] = memory
    return tensors


def encode_arrays(
    tensors: Tensors, changes: Tensors | None = None, wire_dtype: str = _WHOLE
) -> EncodedRecord:
    """Encode contiguous arrays.

    `changes` (uint16, from `rounded_changes`) replace the arrays of the same names. `wire_dtype` is
    their rounded dtype, ``"bfloat16"`` or ``"float16"``.
    """
    changes = changes or {}
    if isinstance(tensors, FlatTensors) and not changes:
        kinds = tensors.flat.layout.kinds
        return EncodedRecord(
            _description_of(kinds, _NONE, _WHOLE), _joined([tensors.flat.bytes.data])
        )
    pieces: list[bytes | memoryview] = []
    for name, tensor in tensors.items():
        sent = changes.get(name, tensor)
        pieces += [sent.reshape(-1).view(np.uint8).data, bytes(-sent.nbytes % ALIGNMENT)]
    kinds = tuple((name, str(tensor.dtype), tensor.shape) for name, tensor in tensors.items())
    return EncodedRecord(_description_of(kinds, frozenset(changes), wire_dtype), _joined(pieces))


_NONE: frozenset[str] = frozenset()


def _joined(pieces: Sequence[bytes | memoryview]) -> list[bytes]:
    """Copy pieces into parts of `CHUNK_BYTES`, of which the first may be shorter."""
    left = sum(map(len, pieces)) % CHUNK_BYTES or CHUNK_BYTES
    parts: list[bytes] = []
    part: list[bytes | memoryview] = []
    for piece in pieces:
        first = 0
        while len(piece) - first > left:
            parts.append(b"".join([*part, piece[first : first + left]]))
            first, part, left = first + left, [], CHUNK_BYTES
        part.append(piece[first:])
        left -= len(piece) - first
    return [*parts, b"".join(part)] if part else parts


def decode_arrays(
    message: Message,
    arrays: FrameArrays,
    base_of: Callable[[str], Tensors],
    array_type: type[ArrayView] = ArrayView,
) -> dict[str, Tensors]:
    """Put the arrays of a frame into its message, and return them by record name.

    Arrays that are not changes are views on the memory of the frame. `base_of` returns the model
    that changes are relative to, by the record's name.

    FrameError if the bytes are not exactly these arrays, or changes are relative to another model.
    """
    if not message.has_content():
        raise FrameError("a message came without content")
    models: dict[str, Tensors] = {}
    elements = arrays.elements
    for name in list(message.content.array_records):
        described = arrays.described[name]
        record = _record_in(described, elements, functools.partial(base_of, name), array_type)
        elements = elements[described.layout.num_bytes :]
        message.content[name] = record
        models[name] = plain_arrays(record)
    if elements.size:
        raise FrameError(f"{elements.size} bytes of a frame belong to no array")
    return models


def _record_in(
    described: Described,
    elements: Bytes,
    base: Callable[[], Tensors],
    array_type: type[ArrayView] = ArrayView,
) -> ArrayRecord:
    """Return the record that elements begin with."""
    layout = described.layout
    if layout.num_bytes > len(elements):
        raise FrameError(f"arrays of {layout.num_bytes} bytes are not in their frame")
    try:
        record = flat_record(layout, elements, kind=array_type)
    except (ValueError, OverflowError) as error:  # of numpy, for a shape that is too long
        raise FrameError(f"arrays of a frame cannot be read: {error}") from None
    if not described.changes:
        return record
    held = base()
    tensors = plain_arrays(record)
    sums: dict[str, AnyArray] = {}
    for name, wire_dtype in described.changes.items():
        shape = tensors[name].shape
        if _kind(held.get(name)) != ("float32", shape):
            raise FrameError(f"array {name!r} of a frame is a change relative to another model")
        change = from_16_bits(np.atleast_1d(tensors[name]), wire_dtype).reshape(shape)
        sums[name] = np.asarray(held[name] + change)  # the sum of 0-d arrays is a scalar
    return record_of({name: array_type(sums.get(name, tensor)) for name, tensor in tensors.items()})


def _kind(tensor: AnyArray | None) -> tuple[str, tuple[int, ...]] | None:
    return None if tensor is None else (str(tensor.dtype), tensor.shape)


# --- changes in 16 bits -------------------------------------------------------------------------


def to_16_bits(values: npt.NDArray[np.float32], wire_dtype: str) -> npt.NDArray[np.uint16]:
    """Return 16-bit patterns of float32 values, rounded to the nearest, ties to even.

    Examples
    --------
    >>> [hex(b) for b in to_16_bits(np.float32([1.0, -2.5]), "bfloat16")]
    ['0x3f80', '0xc020']
    """
    if wire_dtype == "float16":
        with np.errstate(over="ignore"):  # large values become infinite, which the caller checks
            return values.astype(np.float16).view(np.uint16)
    patterns = np.ascontiguousarray(values).view(np.uint32)
    rounded = (patterns + 0x7FFF + ((patterns >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_16_bits(bits: npt.NDArray[np.uint16], wire_dtype: str) -> npt.NDArray[np.float32]:
    """Return the values of 16-bit patterns as float32."""
    if wire_dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded_changes(
    new: Tensors, base: Tensors, carried: Tensors, wire_dtype: str
) -> tuple[Tensors, Tensors]:
    """Return the changes from one model to another, and their rounding errors.

    `carried` has the errors of the previous changes. The changes are 16-bit patterns (uint16) of
    float32 tensors, and the errors are float32. A tensor with a new shape or dtype, or whose change
    is not finite in 16 bits, is left out and must travel whole.
    """
    changes: dict[str, AnyArray] = {}
    errors: dict[str, AnyArray] = {}
    for name, tensor in new.items():
        if tensor.dtype != np.float32 or _kind(base.get(name)) != _kind(tensor):
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            change = tensor - base[name]
            if name in carried:
                change = change + carried[name]
        bits = to_16_bits(np.atleast_1d(change), wire_dtype)
        back = from_16_bits(bits, wire_dtype).reshape(tensor.shape)
        if np.isfinite(back).all():
            changes[name], errors[name] = bits.reshape(tensor.shape), change - back
    return changes, errors


class Broadcast:
    """Versions of a record that all nodes receive, such as the global model.

    After each version all nodes hold the same rounded model, whether it arrived whole or as a
    change. The difference to the true model is part of the next change. `errors` has the relative
    root mean square of that difference for each version.
    """

    def __init__(self, wire_dtype: str) -> None:
        self.errors: list[float] = []
        self._wire_dtype = wire_dtype
        self._held: Tensors = {}

    def next(self, record: ArrayRecord) -> EncodedRecord:
        """Return the next version."""
        tensors = plain_arrays(record)
        # The difference to the held model includes the previous error.
        changes, errors = rounded_changes(tensors, self._held, {}, self._wire_dtype)
        lost = sum(float(np.vdot(error, error)) for error in errors.values())
        whole = sum(float(np.vdot(tensors[name], tensors[name])) for name in errors)
        self.errors.append(math.sqrt(lost / whole) if whole > 0 else 0.0)
        sent = encode_arrays(tensors, changes, self._wire_dtype)
        elements = np.frombuffer(b"".join(sent.elements), np.uint8)
        base = self._held  # before the next line
        record = _record_in(_described(sent.description), elements, lambda: base)
        self._held = plain_arrays(record)  # what the nodes read
        return EncodedRecord(sent.description, sent.elements, len(self.errors), self._held)


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
        tensors, changes = plain_arrays(record), None
        if wire_dtype != "float32" and name in received:
            errors = carried.pop(name, {})
            errors = {k: e for k, e in errors.items() if _kind(e) == _kind(tensors.get(k))}
            changes, carried[name] = rounded_changes(tensors, received[name], errors, wire_dtype)
        records[name] = encode_arrays(tensors, changes, wire_dtype)
    return frame_of(reply, records)


def decode_reply(reply: Message, arrays: FrameArrays, sent: Message) -> Message:
    """Return a reply from `read_frames` as the reply to the message object that was sent.

    Its arrays are views on the frame's memory. Changes are added to the true model that was sent,
    so the rounding error of the node's model does not enter the average.

    FrameError if the arrays cannot be read.
    """
    if reply.has_error():
        return Message(reply.error, reply_to=sent)
    models = sent.content.array_records
    decode_arrays(reply, arrays, lambda name: plain_arrays(models.get(name, ArrayRecord())))
    return Message(reply.content, reply_to=sent)
