"""Arrays on the wire: described without their elements, whole or as changes in 16 bits.

Flower's own format of an array costs milliseconds. Nothing is pickled, and limits are checked
before memory is allocated.

Models may travel as changes in 16 bits. A change is the difference to a model that both ends hold,
so its few bits describe a small number. The rounding error is added to the next change (error
feedback), so it is delayed and not lost.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Message

from ...flower.array_records import (
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
from ...flower.internals import ProtoArray, ProtoArrayRecord

CHUNK_BYTES = 1 << 20
"""Size of the longest gRPC message."""

_LONGEST_DTYPE = 32
_MOST_DIMENSIONS = 64
_LONGEST_CACHED_BYTES = 1 << 18

Bytes = npt.NDArray[np.uint8]
Tensors = Mapping[str, AnyArray]
WireDtype = Literal["float32", "bfloat16", "float16"]


class FrameError(ValueError):
    """Received bytes that are not a valid frame, or a message that cannot be sent."""


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


def taken_out(record: ProtoArrayRecord) -> Described:
    """Return what a record of a received message describes, and empty it.

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
        name = item.key
        array = item.value
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
    pieces: list[bytes | memoryview] = []
    if isinstance(tensors, FlatTensors) and not changes:
        kinds = tensors.flat.layout.kinds
        pieces = [tensors.flat.bytes.data]
    else:
        kinds = tuple((name, str(tensor.dtype), tensor.shape) for name, tensor in tensors.items())
        for name, tensor in tensors.items():
            sent = changes.get(name, tensor)
            pieces += [sent.reshape(-1).view(np.uint8).data, bytes(-sent.nbytes % ALIGNMENT)]
    return EncodedRecord(_description_of(kinds, frozenset(changes), wire_dtype), _joined(pieces))


def _joined(pieces: Sequence[bytes | memoryview]) -> list[bytes]:
    """Copy pieces into parts of `CHUNK_BYTES`, of which the first may be shorter."""
    left = sum(map(len, pieces)) % CHUNK_BYTES or CHUNK_BYTES
    parts: list[bytes] = []
    part: list[bytes | memoryview] = []
    for piece in pieces:
        first = 0
        while len(piece) - first > left:
            parts.append(b"".join([*part, piece[first : first + left]]))
            first = first + left
            part = []
            left = CHUNK_BYTES
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
        if kind_of(held.get(name)) != ("float32", shape):
            raise FrameError(f"array {name!r} of a frame is a change relative to another model")
        change = from_16_bits(np.atleast_1d(tensors[name]), wire_dtype).reshape(shape)
        sums[name] = np.asarray(held[name] + change)  # the sum of 0-d arrays is a scalar
    return record_of({name: array_type(sums.get(name, tensor)) for name, tensor in tensors.items()})


def kind_of(tensor: AnyArray | None) -> tuple[str, tuple[int, ...]] | None:
    """Return an array's dtype and shape; changes are possible between arrays of the same kind."""
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
        if tensor.dtype != np.float32 or kind_of(base.get(name)) != kind_of(tensor):
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            change = tensor - base[name]
            if name in carried:
                change = change + carried[name]
        bits = to_16_bits(np.atleast_1d(change), wire_dtype)
        back = from_16_bits(bits, wire_dtype).reshape(tensor.shape)
        if np.isfinite(back).all():
            changes[name] = bits.reshape(tensor.shape)
            errors[name] = change - back
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
