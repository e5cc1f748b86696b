"""Frames: any body comes out as it went in; bytes that are no frame are refused."""

import contextlib
import itertools
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_blsgd.runtime.stream import frames
from flower_blsgd.runtime.stream.frames import (
    LONGEST_HEADER_BYTES,
    LONGEST_MESSAGE_BYTES,
    PIECE_BYTES,
    Frame,
    FrameError,
    FrameReader,
    Kind,
    cut,
    frame_pieces,
)

HEADERS = st.dictionaries(
    st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5) | st.lists(st.booleans())
)


def read(messages: list[bytes], **limits: int) -> list[Frame]:
    return list(FrameReader(**limits).frames(messages))


def body_of(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def begin(header: bytes, body_bytes: int, kind: int = 3, header_bytes: int | None = None) -> bytes:
    """Return a first message, with lies where they are asked for."""
    length = len(header) if header_bytes is None else header_bytes
    return struct.pack("<4sBIQ", b"blsg", kind, length, body_bytes) + header


def test_frame_without_body_is_these_bytes() -> None:
    """What is on the wire is fixed: nodes may have another version of the library."""
    expected = b"blsg" + b"\x04" + b"\x02\0\0\0" + bytes(8) + b"{}"
    assert frame_pieces(Kind.BYE, {}) == [expected]


def test_frame_with_a_small_body_is_one_message() -> None:
    (message,) = frame_pieces(Kind.MESSAGE, {"a": 1}, [[b"xyz"]])
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
        messages += frame_pieces(kind, header, [cut([memoryview(part)]) for part in parts])
    found = [(f.kind, f.header, f.body.tobytes()) for f in read(messages)]
    assert found == [(kind, header, b"".join(parts)) for kind, header, parts in sent]


@pytest.mark.parametrize(
    "size",
    [0, 1, PIECE_BYTES // 8, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 5],
)
def test_body_of_any_size_and_no_message_that_grpc_would_refuse(size: int) -> None:
    body = body_of(size)
    messages = frame_pieces(Kind.MESSAGE, {"n": size}, [cut([memoryview(body)])])
    assert all(len(message) <= LONGEST_MESSAGE_BYTES for message in messages)
    (frame,) = read(messages)
    assert frame.body.tobytes() == body


def test_longest_header_fits_into_a_message() -> None:
    name = "x" * (LONGEST_HEADER_BYTES - len('{"":0}'))
    messages = frame_pieces(Kind.MESSAGE, {name: 0}, [[bytes(PIECE_BYTES)]])
    assert all(len(message) <= LONGEST_MESSAGE_BYTES for message in messages)
    (frame,) = read(messages)
    assert frame.header == {name: 0}
    with pytest.raises(FrameError, match=r"fewer, larger tensors"):
        frame_pieces(Kind.MESSAGE, {name + "x": 0})


@settings(deadline=None)
@given(st.lists(st.binary(max_size=3 * 64), max_size=6))
def test_cut_pieces_are_full_but_for_the_last(parts: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "PIECE_BYTES", 64)
        pieces = cut(map(memoryview, parts))
    assert b"".join(pieces) == b"".join(parts)
    assert all(len(piece) == 64 for piece in pieces[:-1])
    assert all(1 <= len(piece) <= 64 for piece in pieces[-1:])


@settings(deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=8))
def test_reader_takes_pieces_of_any_cut(body: bytes, places: list[int]) -> None:
    ends = [0, *sorted(min(place, len(body)) for place in places), len(body)]
    pieces = [body[a:b] for a, b in itertools.pairwise(ends)]
    messages = [begin(b"{}", len(body)) + pieces[0], *pieces[1:]]
    while len(messages) > 1 and not messages[-1]:
        messages.pop()  # an empty message after the last byte would begin another frame
    (frame,) = read(messages)
    assert frame.body.tobytes() == body


def test_frame_that_is_not_complete_is_not_there() -> None:
    messages = frame_pieces(Kind.MESSAGE, {}, [cut([memoryview(body_of(2 * PIECE_BYTES))])])
    assert read(messages[:-1]) == []
    assert read([*messages[:-1], messages[-1][:-1]]) == []


def test_memory_of_a_body_is_its_own() -> None:
    piece = bytearray(b"abc")
    (frame,) = read([begin(b"{}", 3), bytes(piece)])
    frame.body[0] = 0
    assert frame.body.flags.owndata
    assert frame.body.flags.writeable


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "cannot begin with 0 bytes"),
        (b"blsg\x03", "cannot begin with 5 bytes"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "no frame"),
        (begin(b"{}", 0, kind=0), "no frame"),
        (begin(b"{}", 0, kind=77), "no frame"),
        (begin(b"{}", 0, header_bytes=3), "header of 3 bytes is not in its message"),
        (begin(b"{}", 0, header_bytes=2**32 - 1), "is not in its message"),
        (begin(b"{}", 2**64 - 1), "more than can be taken"),
        (begin(b"{}", 2**36 + 1), "more than can be taken"),
        (begin(b"[]", 0), "header cannot be read"),
        (begin(b"7", 0), "header cannot be read"),
        (begin(b"{", 0), "header cannot be read"),
        (begin(b"\xff\xfe", 0), "header cannot be read"),
        (begin(b"", 0), "header cannot be read"),
        (begin(b"[" * 100_000, 0), "header cannot be read"),
        (begin(b"{}", 2) + b"abc", "came with more"),
    ],
)
def test_what_is_no_frame_is_refused(message: bytes, reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        FrameReader().feed(message)


def test_body_longer_than_promised_is_refused() -> None:
    reader = FrameReader()
    assert reader.feed(begin(b"{}", 4) + b"ab") is None
    with pytest.raises(FrameError, match="a frame of 4 bytes came with more"):
        reader.feed(b"cde")


def test_body_longer_than_allowed_is_refused_before_memory_is_made() -> None:
    assert len(read([begin(b"{}", 10) + bytes(10)], longest_body=10)) == 1
    with pytest.raises(FrameError, match="11 bytes"):
        read([begin(b"{}", 11)], longest_body=10)


def test_body_larger_than_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "free_bytes", lambda: 100 << 20)
    assert FrameReader().feed(begin(b"{}", 100 << 20)) is None
    with pytest.raises(FrameError, match="more than can be taken"):
        FrameReader().feed(begin(b"{}", (100 << 20) + 1))


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_garbage_raises_nothing_but_frame_error(garbage: bytes) -> None:
    for message in (garbage, b"blsg" + garbage, begin(garbage, 5), begin(b"{}", 5) + garbage):
        with contextlib.suppress(FrameError):
            FrameReader().feed(message)


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(0, 255))
def test_a_wrong_byte_raises_nothing_but_frame_error(place: int, byte: int) -> None:
    message = bytearray(begin(json.dumps({"records": {}}).encode(), 8) + bytes(8))
    message[place % len(message)] = byte
    with contextlib.suppress(FrameError):
        FrameReader(longest_body=1000).feed(bytes(message))
