"""Messages that open and end a stream, and callbacks at its end."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from flwr.app import ConfigRecord, Message, RecordDict

from ...fields import FieldError, from_record
from .encoded_arrays import WireDtype

STREAM_MESSAGE = "train.session"
"""The type of the Flower message that opens a stream."""

_RECORD = "session"
_VERSION = 2
_LONGEST_REASON = 1000  # characters


@dataclass(frozen=True)
class StreamRequest:
    """Content of the Flower message that asks a node to connect.

    `addresses` are possible addresses of the server, ``HOST:PORT``; the node may reach only some of
    them. `certificate` is that of the server (PEM), and `token` that of the node. `wire_dtype` is
    the dtype of float32 models on the wire.
    """

    addresses: list[str]
    certificate: bytes
    token: bytes
    wire_dtype: WireDtype = field(default="float32", metadata={"key": "wire_dtype"})

    def to_records(self) -> RecordDict:
        """Return the content of the message."""
        return RecordDict({_RECORD: ConfigRecord({"version": _VERSION, **asdict(self)})})

    @classmethod
    def from_message(cls, message: Message) -> "StreamRequest":
        """Read the message.

        ValueError if the content is invalid or of another version of this library.
        """
        record = message.content.config_records.get(_RECORD, ConfigRecord())
        if record.get("version") != _VERSION:
            raise ValueError(
                f"the server opens sessions of version {record.get('version')!r} and this node "
                f"knows {_VERSION}; install the same flower-blsgd on both"
            )
        try:
            request = cls(**from_record(cls, record))
        except FieldError:
            request = None
        if request is None or not request.addresses:
            raise ValueError("the request for a session cannot be read")
        return request


@dataclass(frozen=True)
class StreamResult:
    """Content of the node's answer when a stream has ended.

    `connected` is whether there ever was a connection. `reason` is empty if the server ended it.
    """

    connected: bool
    reason: str = ""

    def to_reply(self, message: Message) -> Message:
        """Return the answer to the request."""
        return Message(RecordDict({_RECORD: ConfigRecord(asdict(self))}), reply_to=message)

    @classmethod
    def from_reply(cls, reply: Message) -> "StreamResult":
        """Read the answer; an invalid one counts as never connected."""
        record = reply.content.config_records.get(_RECORD, ConfigRecord())
        reason = " ".join(str(record.get("reason", "no answer"))[:_LONGEST_REASON].split())
        return cls(record.get("connected") is True, reason)


# --- callbacks ----------------------------------------------------------------------------------

_callbacks: list[Callable[[], object]] = []
_serving = threading.Event()


def has_stream() -> bool:
    """Return whether this process serves a stream, and so lives on between messages."""
    return _serving.is_set()


def at_stream_end(callback: Callable[[], object]) -> None:
    """Register a callback for the end of the stream that this process serves.

    It is meant for a ClientApp that holds resources for the whole stream, such as processes. Each
    callback is called once, the last registered first. Exceptions are ignored.
    """
    _callbacks.append(callback)


@contextlib.contextmanager
def serving_stream() -> Iterator[None]:
    """Mark this process as serving a stream, and then call the callbacks of `at_stream_end`."""
    _serving.set()
    try:
        yield
    finally:
        _serving.clear()
        while _callbacks:
            with contextlib.suppress(Exception):
                _callbacks.pop()()
