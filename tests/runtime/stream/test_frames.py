"""Frames and records come out as they went in; bytes that lie are refused."""

import contextlib
import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_blsgd.array_records import view_record
from flower_blsgd.runtime.stream import frames
from flower_blsgd.runtime.stream.frames import (
    CHUNK_BYTES,
    LONGEST_HEADER_BYTES,
    LONGEST_MESSAGE_BYTES,
    EncodedRecord,
    Frame,
    FrameError,
    Kind,
    decode_arrays,
    decode_records,
    encode_record,
    frame_chunks,
    read_frames,
    split,
)

from .nodes import JSON

HEADERS = st.dictionaries(
    st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5) | st.lists(st.booleans())
)


def read(messages: list[bytes]) -> list[Frame]:
    return list(read_frames(messages))


def random_bytes(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def begin(header: bytes, body_bytes: int, kind: int = 3, header_bytes: int | None = None) -> bytes:
    """Return a first message, with lies where they are wanted."""
    length = len(header) if header_bytes is None else header_bytes
    return struct.pack("<4sBIQ", b"blsg", kind, length, body_bytes) + header


# --- frames -------------------------------------------------------------------------------------


def test_bytes_of_a_frame() -> None:
    """What is on the wire is fixed: nodes may have another version of the library."""
    assert frame_chunks(Kind.HELLO, {}) == [b"blsg" + b"\x01" + b"\x02\0\0\0" + bytes(8) + b"{}"]
    (message,) = frame_chunks(Kind.MESSAGE, {"a": 1}, [[b"xyz"]])
    assert message == b"blsg\x03\x07\0\0\0\x03" + bytes(7) + b'{"a":1}xyz'


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(Kind), HEADERS, st.lists(st.binary(max_size=300), max_size=4)),
        max_size=4,
    )
)
def test_frames_one_after_another_come_out_as_they_went_in(
    sent: list[tuple[Kind, dict[str, object], list[bytes]]],
) -> None:
    messages: list[bytes] = []
    for kind, header, parts in sent:
        messages += frame_chunks(kind, header, [split([memoryview(part)]) for part in parts])
    found = [(f.kind, f.header, f.body.tobytes()) for f in read(messages)]
    assert found == [(kind, header, b"".join(parts)) for kind, header, parts in sent]


@pytest.mark.parametrize(
    "size",
    [0, 1, CHUNK_BYTES // 8, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5],
)
def test_body_of_any_size_and_no_message_that_grpc_would_refuse(size: int) -> None:
    body = random_bytes(size)
    messages = frame_chunks(Kind.MESSAGE, {"n": size}, [split([memoryview(body)])])
    assert all(len(message) <= LONGEST_MESSAGE_BYTES for message in messages)
    (frame,) = read(messages)
    assert frame.body.tobytes() == body
    assert frame.body.flags.owndata
    if size > CHUNK_BYTES:  # what is not complete is not there
        assert read(messages[:-1]) == read([*messages[:-1], messages[-1][:-1]]) == []


def test_longest_header_fits_into_a_message() -> None:
    name = "x" * (LONGEST_HEADER_BYTES - len('{"":0}'))
    messages = frame_chunks(Kind.MESSAGE, {name: 0}, [[bytes(CHUNK_BYTES)]])
    assert all(len(message) <= LONGEST_MESSAGE_BYTES for message in messages)
    (frame,) = read(messages)
    assert frame.header == {name: 0}
    with pytest.raises(FrameError, match=r"fewer, larger tensors"):
        frame_chunks(Kind.MESSAGE, {name + "x": 0})


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([b""], "cannot begin with 0 bytes"),
        ([b"blsg\x03"], "cannot begin with 5 bytes"),
        ([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], "no frame"),
        ([begin(b"{}", 0, kind=0)], "no frame"),
        ([begin(b"{}", 0, kind=77)], "no frame"),
        ([begin(b"{}", 0, header_bytes=3)], "header of 3 bytes is not in its message"),
        ([begin(b"{}", 0, header_bytes=2**32 - 1)], "is not in its message"),
        ([begin(b"{}", 2**64 - 1)], "more than can be taken"),
        ([begin(b"{}", 2**36 + 1)], "more than can be taken"),
        ([begin(b"[]", 0)], "header cannot be read"),
        ([begin(b"{", 0)], "header cannot be read"),
        ([begin(b"\xff\xfe", 0)], "header cannot be read"),
        ([begin(b"", 0)], "header cannot be read"),
        ([begin(b"[" * 100_000, 0)], "header cannot be read"),
        ([begin(b"{}", 2) + b"abc"], "came with more"),
        ([begin(b"{}", 4) + b"ab", b"cde"], "a frame of 4 bytes came with more"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(messages: list[bytes], reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        read(messages)


def test_body_longer_than_allowed_or_than_free_memory_is_refused_before_memory_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "free_bytes", lambda: 100 << 20)
    assert read([begin(b"{}", 100 << 20)]) == []
    with pytest.raises(FrameError, match="more than can be taken"):
        read([begin(b"{}", (100 << 20) + 1)])
    monkeypatch.setattr(frames, "LONGEST_BODY_BYTES", 10)
    assert len(read([begin(b"{}", 10) + bytes(10)])) == 1
    with pytest.raises(FrameError, match="11 bytes"):
        read([begin(b"{}", 11)])


@settings(deadline=None)
@given(st.binary(max_size=100), st.integers(0, 11), st.integers(0, 255))
def test_garbage_raises_nothing_but_frame_error(garbage: bytes, at: int, byte: int) -> None:
    valid = bytearray(begin(json.dumps({"records": {}}).encode(), 8) + bytes(8))
    valid[at] = byte
    for message in (garbage, b"blsg" + garbage, begin(garbage, 5), begin(b"{}", 5) + garbage):
        with contextlib.suppress(FrameError):
            read([message])
    with contextlib.suppress(FrameError):
        read([bytes(valid)])


# --- records ------------------------------------------------------------------------------------

DTYPES = [
    *["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
    *["float16", "float32", "float64", "complex64", "complex128"],
    *[">f4", ">i8", "datetime64[ms]", "timedelta64[s]", "S5", "U3", ">U2"],
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5)]


def body_of(encoded: EncodedRecord) -> np.ndarray:
    return np.frombuffer(b"".join(encoded.chunks), np.uint8).copy()


def over_the_wire(record: ArrayRecord) -> dict[str, np.ndarray]:
    encoded = encode_record(record)
    description = json.loads(json.dumps(encoded.description))
    body = body_of(encoded)
    assert description["bytes"] == len(body)
    return decode_arrays(description["layout"], body)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_any_dtype_and_shape(dtype: str) -> None:
    rng = np.random.default_rng(7)
    arrays = {
        str(shape): np.asarray(rng.integers(0, 100, shape)).astype(dtype).reshape(shape)
        for shape in SHAPES
    }
    by_flower = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    for record in (by_flower, view_record(arrays)):
        found = over_the_wire(record)
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            assert_same(found[name], array)


def test_arrays_that_are_not_contiguous() -> None:
    whole = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    arrays = {
        "step": whole[:, ::2],
        "transposed": whole.T,
        "reversed": whole[::-1],
        "fortran": np.asfortranarray(whole),
        "broadcast": np.broadcast_to(np.float32(3), (2, 3)),
        "0-d": whole[1, 1, 1:2].reshape(()),
    }
    found = over_the_wire(view_record(arrays))
    for name, array in arrays.items():
        assert_same(found[name], array)


def test_arrays_are_aligned_views() -> None:
    encoded = encode_record(view_record({str(n): np.ones(n, np.int8) for n in (1, 63, 64, 65, 0)}))
    body = body_of(encoded)
    start = body.__array_interface__["data"][0]
    for array in decode_arrays(encoded.description["layout"], body).values():
        assert (array.__array_interface__["data"][0] - start) % 64 == 0
        assert np.may_share_memory(array, body) or not array.nbytes


class _Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.file), "w")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    file = tmp_path / "was-unpickled"
    buffer = io.BytesIO()
    np.save(buffer, np.array([_Evil(file)], object), allow_pickle=True)
    np.load(io.BytesIO(buffer.getvalue()), allow_pickle=True)  # the bait works
    assert file.exists()
    file.unlink()
    with pytest.raises(FrameError, match="no numpy array of numbers"):
        over_the_wire(ArrayRecord({"a": Array("object", (1,), "numpy.ndarray", buffer.getvalue())}))
    pickled = np.frombuffer(pickle.dumps(_Evil(file)).ljust(128, b"\0"), np.uint8).copy()
    for dtype in ("O", "|O8", "object"):
        with pytest.raises(FrameError):
            decode_arrays([["a", dtype, [1]]], pickled)
    assert not file.exists()


@pytest.mark.parametrize(
    "layout",
    [
        *[None, 7, "abc", {"a": 1}, [7], [[]], [["a"]], [["a", "<f4"]]],
        *[[["a", "<f4", 5]], [["a", "<f4", None]], [["a", "<f4", "12"]], [["a", "<f4", [1.5]]]],
        *[[["a", "<f4", ["1"]]], [["a", "<f4", [None]]], [["a", "<f4", [[1]]]]],
        *[[["a", "<f4", [-1]]], [["a", "<f4", [-2, -2]]], [["a", "<f4", [33]]]],
        *[[["a", "<f4", [2**40, 2**40]]], [["a", "<f4", [2**63]]], [["a", "<f4", [1] * 100]]],
        *[[["a", "<f4", [2**70, 0]]], [["a", "<f4", [0, 2**70]]]],
        [["a", "<f4", [16]], ["b", "<f4", [17]]],  # the second runs over the end
        *[[["a", "O", [1]]], [["a", "no dtype", [1]]], [["a", "f4,(", [1]]], [["a", "(2", [1]]]],
        *[[["a", ["<f4"], [1]]], [["a", {"names": 3}, [1]]], [["a", [["x", "O"]], [1]]]],
        *[[["a", "V0", [1]]], [["a", "U0", [3]]]],
        [["a", "float32", [1], "more"]],
    ],
    ids=str,
)
def test_layout_that_lies_is_refused(layout: Any) -> None:
    with pytest.raises(FrameError):
        decode_arrays(layout, np.zeros(128, np.uint8))


LAYOUTS = JSON | st.lists(
    st.tuples(st.text(max_size=2), JSON, JSON | st.lists(st.integers(-1, 6), max_size=3)).map(list)
)


@settings(deadline=None)
@given(LAYOUTS, st.integers(0, 200))
def test_any_layout_gives_arrays_inside_their_bytes_or_frame_error(layout: Any, size: int) -> None:
    part = np.arange(size, dtype=np.uint8)
    try:
        tensors = decode_arrays(layout, part)
    except FrameError:
        return
    for tensor in tensors.values():
        assert tensor.nbytes <= size
        assert np.may_share_memory(tensor, part) or not tensor.nbytes


def test_records_keep_their_values_and_their_order() -> None:
    config = ConfigRecord(
        {"i": -3, "f": float("inf"), "b": True, "s": "ü", "y": b"\0\xff", "l": [1, 2], "e": []}
    )
    metrics = MetricRecord({"i": 2**40, "f": 0.1, "l": [1.5, 2.5], "nan": float("nan")})
    records = {
        "z": config,
        "arrays": view_record({"w": np.arange(3)}),
        "a": metrics,
        "empty": ArrayRecord(),
    }
    encoded = {name: encode_record(record) for name, record in records.items()}
    body = np.concatenate([body_of(record) for record in encoded.values()])
    descriptions = {name: record.description for name, record in encoded.items()}
    found = decode_records(
        json.loads(json.dumps(descriptions)),
        body,
        lambda name, description, part: view_record(decode_arrays(description["layout"], part)),
    )
    assert isinstance(found, RecordDict)
    assert list(found) == list(records)
    assert isinstance(found["z"], ConfigRecord)
    assert dict(found["z"]) == dict(config)
    assert type(found["z"]["b"]) is bool
    assert np.isnan(found["a"].pop("nan"))
    assert dict(found["a"]) == {"i": 2**40, "f": 0.1, "l": [1.5, 2.5]}
    np.testing.assert_array_equal(found["arrays"]["w"].numpy(), np.arange(3))
    assert not found["empty"]


@pytest.mark.parametrize(
    "description",
    [
        *[None, [], {}, {"kind": "config"}],
        *[{"kind": "config", "bytes": n} for n in (-1, 64, 65, 2**70, "3", 1.0)],
        {"kind": "metrics", "bytes": 64},
        *[{"kind": kind, "bytes": 1} for kind in ("pickle", None, ["config"], {})],
    ],
    ids=str,
)
def test_record_that_is_not_as_described_is_refused(description: Any) -> None:
    with pytest.raises(FrameError, match="'r'"):
        decode_records({"r": description}, np.full(64, 0xFF, np.uint8), lambda *_: ArrayRecord())


@settings(deadline=None)
@given(
    st.dictionaries(st.text(max_size=3), JSON, max_size=3),
    st.sampled_from(["config", "metrics"]),
    st.binary(max_size=80),
)
def test_any_description_and_bytes_raise_nothing_but_frame_error(
    descriptions: Any, kind: str, body: bytes
) -> None:
    part = np.frombuffer(body, np.uint8)
    with contextlib.suppress(FrameError):
        decode_records(descriptions, part, lambda *_: ArrayRecord())
    with contextlib.suppress(FrameError):  # whatever Flower's own reading raises
        decode_records({"r": {"kind": kind, "bytes": len(body)}}, part, lambda *_: ArrayRecord())
