"""Flower messages as frames: orders that go to nodes, and the replies to them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Error, Message

from ..flower_internals import message_to
from .broadcast import Broadcast, BroadcastRecord
from .frames import Bytes, Frame, FrameError, Kind, frame_pieces
from .held_models import HeldModels, reply_record
from .records import EncodedRecord, decode_arrays, decode_records, encode_record


@dataclass(frozen=True)
class Letter:
    """A message to a node, encoded.

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
        """Which message."""
        return self.message.metadata.message_id


class Encoder:
    """Encodes messages that are sent together; a record that several share is encoded once.

    Parameters
    ----------
    wire_dtype : str
        What changes of models are rounded to; ``"float32"`` sends them as they are.
    broadcasts : dict of str to Broadcast
        Models that all nodes hold, by the name of their record; kept from one time to the next.
    """

    def __init__(self, wire_dtype: str, broadcasts: dict[str, Broadcast]) -> None:
        self._wire_dtype, self._broadcasts = wire_dtype, broadcasts
        self._done: dict[int, tuple[object, EncodedRecord | BroadcastRecord]] = {}
        self._broadcast_now: set[str] = set()

    def letter(self, message: Message) -> Letter:
        """Return a message, ready to be sent."""
        records = {name: self._encoded(name, r) for name, r in message.content.items()}
        return Letter(message, records, self._wire_dtype)

    def _encoded(self, name: str, record: Any) -> EncodedRecord | BroadcastRecord:
        if not isinstance(record, ArrayRecord):
            return encode_record(record)
        if id(record) not in self._done:
            self._done[id(record)] = record, self._new(name, record)
        return self._done[id(record)][1]

    def _new(self, name: str, record: ArrayRecord) -> EncodedRecord | BroadcastRecord:
        if self._wire_dtype != "float32" and name not in self._broadcast_now:
            # A second record of this name is one node's own: it travels as it is.
            self._broadcast_now.add(name)
            broadcast = self._broadcasts.setdefault(name, Broadcast(self._wire_dtype))
            version = broadcast.next(record)
            if version is not None:
                return version
        return encode_record(record)


def letter_pieces(letter: Letter, held: dict[str, int], awaited: Iterable[str] = ()) -> list[bytes]:
    """Return a letter as gRPC messages.

    Parameters
    ----------
    letter : Letter
        The letter.
    held : dict of str to int
        The versions that its receiver holds, by the name of the record; brought up to date.
    awaited : iterable of str
        The messages to which its receiver owes a reply; those to others it may forget.
    """
    metadata = letter.message.metadata
    header = {
        "id": metadata.message_id,
        "type": metadata.message_type,
        "group": metadata.group_id,
        "ttl": metadata.ttl,
        "awaited": list(awaited),
    }
    records = {}
    for name, record in letter.records.items():
        if isinstance(record, BroadcastRecord):
            records[name] = record.for_holder_of(held.get(name))
            held[name] = record.version
        else:
            records[name] = record
    return _pieces(header, records)


def message_in(frame: Frame, session: Message, node_id: int, held: HeldModels) -> Message:
    """Return the message in a frame, as the node gets it.

    Parameters
    ----------
    frame : Frame
        Of kind MESSAGE.
    session : Message
        The one that opened the session: run and server are its own.
    node_id : int
        The node's.
    held : HeldModels
        Reads models, and keeps what it needs for the next.

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


def reply_pieces(reply: Message, held: HeldModels) -> list[bytes]:
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
    return _pieces(header, records)


def reply_in(frame: Frame, letter: Letter) -> Message:
    """Return the reply in a frame; FrameError if there is none.

    Its arrays are views on the frame's memory.
    """
    error = frame.header.get("error")
    if error is not None:
        try:
            code, reason = error
            return Message(Error(int(code), str(reason)), reply_to=letter.message)
        except (TypeError, ValueError, OverflowError):
            raise FrameError("an error came without code and reason") from None

    def read(name: str, description: Mapping[str, Any], part: Bytes) -> ArrayRecord:
        if description.get("kind") != "change":
            return decode_arrays(description.get("layout"), part, views=True)
        sent = letter.message.content.array_records.get(name, ArrayRecord())
        return reply_record(name, description, part, sent, letter.wire_dtype)

    content = decode_records(_descriptions(frame), frame.body, read)
    return Message(content, reply_to=letter.message)


def _pieces(header: dict[str, Any], records: Mapping[str, EncodedRecord]) -> list[bytes]:
    # What is small comes first, so that it fits beside the header.
    ordered = sorted(records.items(), key=lambda item: item[1].description["bytes"])
    header["records"] = {name: record.description for name, record in ordered}
    return frame_pieces(Kind.MESSAGE, header, [record.pieces for _, record in ordered])


def _descriptions(frame: Frame) -> Mapping[str, Any]:
    records = frame.header.get("records")
    if not isinstance(records, dict):
        raise FrameError("a message came without its records")
    return records
