"""Messages to a node with several devices: what they hold once, and what each worker's own is.

A worker has a place within its node, from 0 on. What its own message, or reply, would hold comes
as records whose names end in ``-`` and that place; what all share comes once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from ..wire import ProtocolError, from_wire, to_wire
from .names import ARRAYS, CONFIG, NUM_EXAMPLES

HOST = "host"
"""The record that tells these messages from those of one worker."""

_ORDER = "order"
_PLACES, _FAILED, _CODES, _REASONS = "places", "failed", "codes", "reasons"


@dataclass(frozen=True)
class HostOrders:
    """The orders of the workers behind one node: to train, or to evaluate.

    Parameters
    ----------
    contents : mapping of int to RecordDict
        By place: what the worker's own message would hold. All records but its settings are
        shared.
    arrays_key, config_key : str
        The names of the model and of the settings in them.
    weighted_by : str (default: "num-examples")
        A figure that every reply must hold.
    worker_weight : str (default: "load")
        How the models are averaged there; this and what follows as in `HostRule`.
    update_norms : list of float
        As there.
    moving : list of str
        As there.
    """

    contents: Mapping[int, RecordDict] = field(metadata={"wire": False})
    arrays_key: str = ARRAYS
    config_key: str = CONFIG
    weighted_by: str = NUM_EXAMPLES
    worker_weight: str = "load"
    update_norms: list = field(default_factory=list)  # type: ignore[type-arg]  # from_wire's type
    moving: list = field(default_factory=list)  # type: ignore[type-arg]

    def to_records(self) -> RecordDict:
        """Return the content of the message; what is shared is not copied."""
        records = RecordDict({HOST: ConfigRecord(to_wire(self))})
        for place, content in self.contents.items():
            for name, record in content.items():
                if name == self.config_key:
                    records[f"{_ORDER}-{place}"] = record
                elif name not in records:
                    records[name] = record
        return records

    @classmethod
    def from_message(cls, message: Message) -> "HostOrders":
        """Read the orders in a message.

        Raises
        ------
        ProtocolError
            If it holds none, or they are not what they must be.
        """
        config = message.content.config_records
        known = {f.name.replace("_", "-") for f in fields(cls)}
        values = from_wire(cls, {k: v for k, v in config[HOST].items() if k in known})
        if not all(isinstance(norm, float) for norm in values["update_norms"]):
            raise ProtocolError("the message's update-norms are not numbers")
        if not all(isinstance(name, str) for name in values["moving"]):
            raise ProtocolError("the message's moving are not names")
        own, shared = _by_place(message.content)
        orders = {place: records[_ORDER] for place, records in own.items() if _ORDER in records}
        if not orders or not all(isinstance(order, ConfigRecord) for order in orders.values()):
            raise ProtocolError("the message to a node with several devices holds no orders")
        del shared[HOST]
        contents = {
            place: RecordDict({**shared, values["config_key"]: order})
            for place, order in orders.items()
        }
        return cls(contents, **values)


@dataclass(frozen=True)
class Failure:
    """Why a worker did not do what was asked.

    Parameters
    ----------
    code : int
        Flower's error code; 0 if it answered, but not as it should.
    reason : str
        In words; the last line says it briefly.
    """

    code: int
    reason: str

    @property
    def brief(self) -> str:
        """The reason in one line."""
        return (self.reason.strip() or f"error {self.code}").splitlines()[-1]


@dataclass(frozen=True)
class HostReply:
    """What became of the orders, or of a query, of the workers behind one node.

    Parameters
    ----------
    parts : mapping of int to RecordDict
        By place: the records of the worker's own reply, but for what is averaged.
    failures : mapping of int to Failure
        By place: the workers without such.
    shared : RecordDict
        The host's own records, such as the averaged model.
    """

    parts: Mapping[int, RecordDict]
    failures: Mapping[int, Failure]
    shared: RecordDict = field(default_factory=RecordDict)

    def to_reply(self, message: Message) -> Message:
        """Return the reply to the message."""
        told: dict[str, Any] = {
            _PLACES: sorted(self.parts),
            _FAILED: sorted(self.failures),
            _CODES: [self.failures[place].code for place in sorted(self.failures)],
            _REASONS: [self.failures[place].reason for place in sorted(self.failures)],
        }
        records = RecordDict({**self.shared, HOST: ConfigRecord(told)})
        for place, part in self.parts.items():
            for name, record in part.items():
                records[f"{name}-{place}"] = record
        return Message(records, reply_to=message)

    @classmethod
    def from_content(cls, content: RecordDict) -> "HostReply":
        """Read the content of a reply.

        Raises
        ------
        ProtocolError
            If it is not such a reply.
        """
        told = content.config_records.get(HOST)
        if told is None:
            raise ProtocolError("the reply does not come from a node with several devices")
        parts, shared = _by_place(content)
        del shared[HOST]
        places, failed = _list_of(int, told, _PLACES), _list_of(int, told, _FAILED)
        codes, reasons = _list_of(int, told, _CODES), _list_of(str, told, _REASONS)
        if not len(failed) == len(codes) == len(reasons) or set(parts) - set(places):
            raise ProtocolError("the reply of a node with several devices contradicts itself")
        failures = {
            place: Failure(code, reason)
            for place, code, reason in zip(failed, codes, reasons, strict=True)
        }
        return cls(
            {place: RecordDict(parts.get(place, {})) for place in places},
            failures,
            RecordDict(shared),
        )


def is_order(name: str) -> bool:
    """Whether a record of this name, in a message to such a node, is the order of one worker."""
    base, _, place = name.rpartition("-")
    return base == _ORDER and place.isascii() and place.isdecimal()


def _by_place(content: RecordDict) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Return the records of each place, by name without it, and those without a place."""
    own: dict[int, dict[str, Any]] = {}
    shared: dict[str, Any] = {}
    for name, record in content.items():
        base, dash, place = name.rpartition("-")
        if dash and place.isascii() and place.isdecimal():
            own.setdefault(int(place), {})[base] = record
        else:
            shared[name] = record
    return dict(sorted(own.items())), shared


def _list_of(kind: type, record: Mapping[str, Any], key: str) -> Sequence[Any]:
    values = record.get(key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ProtocolError(f"the reply's {key} are not what they must be")
    return values
