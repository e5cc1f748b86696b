"""What travels on a stream: frames, each a small header and then bytes, cut into pieces.

A frame is one JSON header and a body of any size. gRPC carries it as several messages: the first
holds the header, the others pieces of the body, which the receiver reads into place. Nothing is
pickled, and a length is checked before memory is made for it.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ..memory import free_bytes

PIECE_BYTES = 1 << 20
"""The longest piece of a body in one gRPC message."""

LONGEST_HEADER_BYTES = 2 << 20
LONGEST_MESSAGE_BYTES = LONGEST_HEADER_BYTES + PIECE_BYTES + 64
"""What gRPC is told to refuse more than."""

LONGEST_BODY_BYTES = 1 << 36
_SMALL_BYTES = 16 << 20

_PREFIX = struct.Struct("<4sBIQ")
_MAGIC = b"blsg"

Bytes = npt.NDArray[np.uint8]


class FrameError(ValueError):
    """Bytes that are not a frame, or one that must not be."""


class Kind(IntEnum):
    """What a frame is for."""

    HELLO = 1
    """The client's first: which messages it has already."""
    WELCOME = 2
    """The server's answer."""
    MESSAGE = 3
    """A Flower message, either way."""
    BYE = 4
    """The client ends; nobody need wait for it."""
    END = 5
    """The session is over."""


@dataclass(frozen=True)
class Frame:
    """One frame, as it arrived.

    Parameters
    ----------
    kind : Kind
        What it is for.
    header : mapping
        What JSON can hold.
    body : ndarray of uint8
        Memory of its own.
    """

    kind: Kind
    header: Mapping[str, Any]
    body: Bytes = field(repr=False)


def frame_pieces(
    kind: Kind, header: Mapping[str, Any], body: Sequence[Sequence[bytes]] = ()
) -> list[bytes]:
    """Return a frame as gRPC messages.

    Parameters
    ----------
    kind : Kind
        What it is for.
    header : mapping
        What JSON can hold.
    body : sequence of sequences of bytes
        Parts of the body, each cut into pieces already: those that several frames share are
        made once.

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
    pieces = [piece for part in body for piece in part]
    first = _PREFIX.pack(_MAGIC, kind, len(text), sum(map(len, pieces))) + text
    taken = 0
    while taken < len(pieces) and len(first) + len(pieces[taken]) <= PIECE_BYTES // 8:
        first += pieces[taken]  # what is small needs no message of its own
        taken += 1
    return [first, *pieces[taken:]]


def cut(parts: Iterable[memoryview]) -> list[bytes]:
    """Return the bytes of these parts, one after another, as pieces of a body."""
    pieces: list[bytes] = []
    begun: list[memoryview] = []
    room = PIECE_BYTES
    for part in parts:
        at = 0
        while at < len(part):
            taken = part[at : at + room]
            begun.append(taken)
            at += len(taken)
            room -= len(taken)
            if not room:
                pieces.append(b"".join(begun))
                begun, room = [], PIECE_BYTES
    if begun:
        pieces.append(b"".join(begun))
    return pieces


class FrameReader:
    """Puts frames together again.

    Parameters
    ----------
    longest_body : int, optional
        Refuse a longer body, in bytes.
    """

    def __init__(self, longest_body: int = LONGEST_BODY_BYTES) -> None:
        self._longest_body = longest_body
        self._begun: tuple[Kind, Mapping[str, Any], Bytes] | None = None
        self._filled = 0

    def frames(self, messages: Iterable[bytes]) -> Iterator[Frame]:
        """Yield each frame when its last byte is there.

        Raises
        ------
        FrameError
            If the bytes are not frames, or one is too long, also for the memory there is.
        """
        for message in messages:
            frame = self.feed(message)
            if frame is not None:
                yield frame

    def feed(self, message: bytes) -> Frame | None:
        """Take a gRPC message; return the frame that it completes."""
        piece = message if self._begun is not None else self._begin(message)
        assert self._begun is not None
        kind, header, body = self._begun
        end = self._filled + len(piece)
        if end > len(body):
            raise FrameError(f"a frame of {len(body)} bytes came with more")
        body.data[self._filled : end] = piece
        self._filled = end
        if end < len(body):
            return None
        self._begun, self._filled = None, 0
        return Frame(kind, header, body)

    def _begin(self, message: bytes) -> bytes:
        """Read the header, make room for the body, and return the rest of the message."""
        if len(message) < _PREFIX.size:
            raise FrameError(f"a frame cannot begin with {len(message)} bytes")
        magic, kind, header_bytes, body_bytes = _PREFIX.unpack_from(message)
        if magic != _MAGIC or kind not in set(Kind):
            raise FrameError("these bytes are no frame")
        if header_bytes > min(LONGEST_HEADER_BYTES, len(message) - _PREFIX.size):
            raise FrameError(f"a header of {header_bytes} bytes is not in its message")
        if body_bytes > self._longest_body or not _fits(body_bytes):
            raise FrameError(f"a frame of {body_bytes} bytes is more than can be taken")
        text_end = _PREFIX.size + header_bytes
        try:
            header = json.loads(message[_PREFIX.size : text_end])
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise FrameError("a frame's header cannot be read")
        try:
            body = np.empty(body_bytes, np.uint8)
        except MemoryError:
            raise FrameError(f"there is no memory for a frame of {body_bytes} bytes") from None
        self._begun = Kind(kind), header, body
        return message[text_end:]


def _fits(num_bytes: int) -> bool:
    if num_bytes < _SMALL_BYTES:
        return True  # asking takes longer than reading it
    free = free_bytes()
    return free is None or num_bytes <= free
