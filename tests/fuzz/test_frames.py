"""Frames that lie, in both directions: `FrameError`, or a message that is what it says it is.

Bytes of real frames are changed, added and taken away, and the lengths in front put right again,
so that the lie is found where it is and not by its length.
"""

import struct
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.engines.stream.codec import (
    acknowledgement_of,
    chunks_of,
    decode_reply,
    encode_messages,
    encode_reply,
    frame_of,
    read_frames,
)
from flower_blsgd.engines.stream.encoded_arrays import Broadcast, FrameError, decode_arrays
from flower_blsgd.flower.array_records import AnyArray, is_plain, view_record
from flower_blsgd.flower.internals import RAISED, become_server, give_message_id

from .mutations import changed_bytes, thoroughly

# --- real frames, and what each end makes of one --------------------------------------------------

MODEL = {
    "w": np.arange(20, dtype=np.float32).reshape(4, 5),
    "n": np.array([3]),
    "t": np.float32(0.5).reshape(()),
}
PREFIX = struct.Struct("<QQ")


def made_order() -> Message:
    order = Message(
        RecordDict(
            {
                "arrays": view_record(MODEL),
                "config": ConfigRecord({"i": -3, "y": b"\0\xff" * 8, "l": [1, 2], "s": "text"}),
                "metrics": MetricRecord({"x": [1.0, 2.0], "n": 2**40}),
            }
        ),
        7,
        "train",
        group_id="12",
    )
    give_message_id(order)
    return order


become_server(run_id=1)
ORDER = made_order()


def real_frames() -> list[bytes]:
    """Return frames of every kind that travels, in either direction."""
    broadcasts: dict[str, Broadcast] = {}
    frames = [
        frame_of(*encode_messages([ORDER], broadcasts, dtype)[0], {"arrays": 1})
        for dtype in ("float32", "bfloat16", "bfloat16")  # the last as a change
    ]
    changed = {**MODEL, "w": MODEL["w"] + np.float32(0.25)}
    reply = Message(
        RecordDict({"arrays": view_record(changed), "metrics": MetricRecord({"x": 1.0})}),
        reply_to=ORDER,
    )
    frames += [encode_reply(reply, {"arrays": MODEL}, {}, d) for d in ("float32", "float16")]
    frames.append(encode_reply(Message(Error(RAISED, "ü"), reply_to=ORDER), {}, {}, "float32"))
    frames.append(acknowledgement_of(reply))
    return [b"".join(frame) for frame in frames]


FRAMES = real_frames()


def held(name: str) -> dict[str, AnyArray]:
    return MODEL if name == "arrays" else {}


def read_by_the_node(message: Message, elements: AnyArray) -> Message:
    decode_arrays(message, elements, held)
    return message


def read_by_the_server(message: Message, elements: AnyArray) -> Message:
    return decode_reply(message, elements, ORDER)


ENDS = pytest.mark.parametrize("read", [read_by_the_node, read_by_the_server])
Reader = Callable[[Message, AnyArray], Message]


def read_frame(read: Reader, data: bytes, chunk_bytes: int) -> list[Message]:
    """Read what is sent as the bytes of a frame; the one error becomes no message."""
    chunks = [data[i : i + chunk_bytes] for i in range(0, len(data), chunk_bytes)] or [b""]
    try:
        return [read(message, elements) for message, elements in read_frames(chunks)]
    except FrameError:
        return []


def assert_well_formed(message: Message, frame_bytes: int) -> None:
    """Check that a message is what it says, is no larger than what came, and can be sent on."""
    if message.has_error():
        assert isinstance(message.error.code, int)
        return
    total = 0
    for record in message.content.array_records.values():
        for array in record.values():
            tensor = array.numpy()
            assert is_plain(tensor.dtype)
            assert (str(tensor.dtype), tensor.shape) == (array.dtype, tuple(array.shape))
            total += tensor.nbytes
    assert total <= 2 * frame_bytes, "a change has half the bytes"
    again = list(read_frames(chunks_of(encode_reply(message, {}, {}, "float32"))))
    ((copy, elements),) = again
    models = decode_arrays(copy, elements, held)
    for name, record in message.content.array_records.items():
        for key, array in record.items():
            assert models[name][key].tobytes() == array.numpy().tobytes()
    for name in message.content.keys() - models.keys():
        assert repr(copy.content[name]) == repr(message.content[name])  # NaN is NaN


# --- frames with lies -----------------------------------------------------------------------------


def framed(header: bytes, elements: bytes) -> bytes:
    """Return a frame whose lengths are right."""
    first = -(-(PREFIX.size + len(header)) // 64) * 64
    return (PREFIX.pack(first + len(elements), len(header)) + header).ljust(first, b"\0") + elements


@ENDS
@thoroughly(10)
@given(st.data())
def test_real_frames_that_were_changed(read: Reader, data: st.DataObject) -> None:
    frame = data.draw(st.sampled_from(FRAMES))
    header_bytes = PREFIX.unpack_from(frame)[1]
    first = -(-(PREFIX.size + header_bytes) // 64) * 64
    header, elements = frame[PREFIX.size : PREFIX.size + header_bytes], frame[first:]
    where = data.draw(st.sampled_from(["header", "elements", "both", "frame"]))
    if where in ("header", "both"):
        header = data.draw(changed_bytes(header))
    if where in ("elements", "both"):
        elements = data.draw(changed_bytes(elements))
    sent = data.draw(changed_bytes(frame)) if where == "frame" else framed(header, elements)
    for message in read_frame(read, sent, data.draw(st.integers(1, 4096))):
        assert_well_formed(message, len(sent))


def test_real_frames_are_read() -> None:
    """Else what is above would show nothing."""
    by_node = [len(read_frame(read_by_the_node, frame, 100)) for frame in FRAMES]
    by_server = [len(read_frame(read_by_the_server, frame, 100)) for frame in FRAMES]
    assert by_node == [1, 1, 1, 1, 1, 0, 1], "a node gets no error messages"
    assert by_server == [1] * len(FRAMES)
