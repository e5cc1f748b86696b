"""Flower messages as frames, and the one ordinary Flower message that opens a session."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict

from ...array_records import view_record
from ..flower_internals import message_to
from .frames import (
    Bytes,
    EncodedRecord,
    Frame,
    FrameError,
    Kind,
    decode_arrays,
    decode_records,
    encode_record,
    frame_chunks,
)
from .model_changes import Broadcast, BroadcastRecord, HeldModels, decode_reply_change

SESSION_MESSAGE = "train.session"
"""The type of the Flower message that opens a session."""

_SESSION_RECORD = "session"
_VERSION = 1


# --- messages on the stream -------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedMessage:
    """A message to a node, ready to be sent.

    Parameters
    ----------
    message : Message
        The message; it has its id.
    records : mapping of str to EncodedRecord or BroadcastRecord
        Its content.
    wire_dtype : str (default: "float32")
        Of changes in its reply.
    """

    message: Message
    records: Mapping[str, EncodedRecord | BroadcastRecord] = field(repr=False)
    wire_dtype: str = "float32"

    @property
    def message_id(self) -> str:
        """The message's id."""
        return self.message.metadata.message_id


class Encoder:
    """Encodes messages that are sent together; a record that several share is encoded once.

    Parameters
    ----------
    wire_dtype : str
        What changes of models are rounded to; ``"float32"`` sends them as they are.
    broadcasts : dict of str to Broadcast
        Models that all nodes hold, by the name of their record; the caller keeps them from one
        encoder to the next.
    """

    def __init__(self, wire_dtype: str, broadcasts: dict[str, Broadcast]) -> None:
        self._wire_dtype, self._broadcasts = wire_dtype, broadcasts
        self._done: dict[tuple[str, int], tuple[object, EncodedRecord | BroadcastRecord]] = {}
        self._broadcast_now: set[str] = set()

    def encode(self, message: Message) -> EncodedMessage:
        """Return a message, ready to be sent."""
        records = {name: self._encoded(name, r) for name, r in message.content.items()}
        return EncodedMessage(message, records, self._wire_dtype)

    def _encoded(self, name: str, record: Any) -> EncodedRecord | BroadcastRecord:
        if not isinstance(record, ArrayRecord):
            return encode_record(record)
        if (name, id(record)) not in self._done:
            encoded: EncodedRecord | BroadcastRecord
            if self._wire_dtype == "float32" or name in self._broadcast_now:
                # A second record of this name is one node's own: it travels as it is.
                encoded = encode_record(record)
            else:
                self._broadcast_now.add(name)
                broadcast = self._broadcasts.setdefault(name, Broadcast(self._wire_dtype))
                encoded = broadcast.next(record)
            self._done[name, id(record)] = record, encoded
        return self._done[name, id(record)][1]


def message_chunks(
    encoded: EncodedMessage, held: dict[str, int], awaited: Iterable[str] = ()
) -> list[bytes]:
    """Return a message to a node as gRPC messages.

    Parameters
    ----------
    encoded : EncodedMessage
        The message.
    held : dict of str to int
        The versions that its receiver holds, by the name of the record; brought up to date.
    awaited : iterable of str
        The messages to which its receiver owes a reply; it may drop its replies to all others.
    """
    metadata = encoded.message.metadata
    header = {
        "id": metadata.message_id,
        "type": metadata.message_type,
        "group": metadata.group_id,
        "ttl": metadata.ttl,
        "awaited": list(awaited),
    }
    records = {}
    for name, record in encoded.records.items():
        if isinstance(record, BroadcastRecord):
            records[name] = record.for_holder_of(held.get(name))
            held[name] = record.version
        else:
            records[name] = record
    return _chunks(header, records)


def decode_message(frame: Frame, session: Message, node_id: int, held: HeldModels) -> Message:
    """Return the message in a frame, as Flower would give it to the node.

    `session` is the message that opened the session, of the same run and server; `held` reads
    models, and keeps what it needs for the next.

    Raises
    ------
    FrameError
        If there is no message in it.
    """
    message_id, kind = frame.header.get("id"), frame.header.get("type")
    if not isinstance(message_id, str) or not isinstance(kind, str):
        raise FrameError("a message came without its id or type")
    group_id, ttl = frame.header.get("group"), frame.header.get("ttl")
    if not isinstance(group_id, str) or not isinstance(ttl, int | float):
        raise FrameError("a message came without its group or time to live")
    held.begin(message_id)
    content = decode_records(_descriptions(frame), frame.body, held.read)
    return message_to(node_id, content, kind, message_id, session, group_id, ttl)


def reply_chunks(reply: Message, held: HeldModels) -> list[bytes]:
    """Return the reply to a message as gRPC messages; its models may be changes to held ones."""
    message_id = reply.metadata.reply_to_message_id
    header: dict[str, Any] = {"reply-to": message_id}
    if reply.has_error():
        header["error"] = [reply.error.code, reply.error.reason or ""]
        records = {}
    else:
        records = {
            name: held.write(message_id, name, record)
            if isinstance(record, ArrayRecord)
            else encode_record(record)
            for name, record in reply.content.items()
        }
    held.forget(message_id)
    return _chunks(header, records)


def decode_reply(frame: Frame, encoded: EncodedMessage) -> Message:
    """Return the reply to a message in a frame; its arrays are views on the frame's memory.

    Raises
    ------
    FrameError
        If there is no reply in it.
    """
    error = frame.header.get("error")
    if error is not None:
        try:
            code, reason = error
            return Message(Error(int(code), str(reason)), reply_to=encoded.message)
        except (TypeError, ValueError, OverflowError):
            raise FrameError("an error came without code and reason") from None

    def read(name: str, description: Mapping[str, Any], part: Bytes) -> ArrayRecord:
        if description.get("kind") != "change":
            return view_record(decode_arrays(description.get("layout"), part))
        sent = encoded.message.content.array_records.get(name, ArrayRecord())
        return decode_reply_change(name, description, part, sent, encoded.wire_dtype)

    content = decode_records(_descriptions(frame), frame.body, read)
    return Message(content, reply_to=encoded.message)


def _chunks(header: dict[str, Any], records: Mapping[str, EncodedRecord]) -> list[bytes]:
    # Small records first, so that they fit into the header's message.
    ordered = sorted(records.items(), key=lambda item: item[1].description["bytes"])
    header["records"] = {name: record.description for name, record in ordered}
    return frame_chunks(Kind.MESSAGE, header, [record.chunks for _, record in ordered])


def _descriptions(frame: Frame) -> Mapping[str, Any]:
    records = frame.header.get("records")
    if not isinstance(records, dict):
        raise FrameError("a message came without its records")
    return records


# --- how a session is opened and answered -------------------------------------------------------


@dataclass(frozen=True)
class SessionRequest:
    """The content of the Flower message that asks a node to connect.

    Parameters
    ----------
    addresses : tuple of str
        ``HOST:PORT``, any of which may be the one that the node can reach.
    certificate : bytes
        The server's, as PEM.
    token : bytes
        This node's.
    wire_dtype : str
        How float32 models travel.
    """

    addresses: tuple[str, ...]
    certificate: bytes
    token: bytes
    wire_dtype: str = "float32"

    def to_records(self) -> RecordDict:
        """Return the content of the message."""
        record = ConfigRecord(
            {
                "version": _VERSION,
                "addresses": list(self.addresses),
                "certificate": self.certificate,
                "token": self.token,
                "wire-dtype": self.wire_dtype,
            }
        )
        return RecordDict({_SESSION_RECORD: record})

    @classmethod
    def from_message(cls, message: Message) -> "SessionRequest":
        """Read the message.

        Raises
        ------
        FrameError
            If it is none, or one of another version of this library.
        """
        record = message.content.config_records.get(_SESSION_RECORD, ConfigRecord())
        if record.get("version") != _VERSION:
            raise FrameError(
                f"the server opens sessions of version {record.get('version')!r} and this node "
                f"knows {_VERSION}; install the same flower-blsgd on both"
            )
        try:
            return cls(
                tuple(str(address) for address in record["addresses"]),  # type: ignore[union-attr]
                bytes(record["certificate"]),  # type: ignore[arg-type]
                bytes(record["token"]),  # type: ignore[arg-type]
                str(record["wire-dtype"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"the request for a session cannot be read: {error}") from None


@dataclass(frozen=True)
class SessionResult:
    """How a session ended, as the node sees it: the content of its answer.

    Parameters
    ----------
    connected : bool
        Whether there ever was a connection.
    reason : str
        Why it ended, or why there was none; empty if the server ended it.
    """

    connected: bool
    reason: str = ""

    def to_reply(self, message: Message) -> Message:
        """Return the answer to the request."""
        record = ConfigRecord({"connected": self.connected, "reason": self.reason})
        return Message(RecordDict({_SESSION_RECORD: record}), reply_to=message)

    @classmethod
    def from_reply(cls, reply: Message) -> "SessionResult":
        """Read the answer; one that cannot be read counts as never connected."""
        record = reply.content.config_records.get(_SESSION_RECORD, ConfigRecord())
        return cls(record.get("connected") is True, str(record.get("reason", "no answer")))
