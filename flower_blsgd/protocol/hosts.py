"""Messages to and from a node with several devices: one message for all workers of the node.

A worker has a local rank within its node, from 0. The names of its records begin with that rank and
``/``. Records that all workers share, such as the model, are sent once; their names begin with
``/``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flwr.app import ConfigRecord, Message, RecordDict

from ..fields import to_record
from .failure import Failure, ProtocolError
from .records import ARRAYS, CONFIG, NUM_EXAMPLES, from_wire

HOST = "host"
"""Name of the record that marks these messages."""

_ORDER, _FAILURE = "order", "failure"
_KEY = re.compile(r"(0|[1-9][0-9]{0,4})?/(.*)", re.DOTALL)


@dataclass(frozen=True)
class HostOrders:
    """Orders for the workers of one node: to train, to evaluate, or to answer a query.

    `contents` has the content of each worker's own message, by local rank; records in all of them
    are sent once. `arrays_key` and `config_key` name the model and the settings in it. Every reply
    must have the metric `weighted_by`. `worker_weight`, `update_norms` and `moving` are those of
    `algorithm.averaging.average_at_node`, but tensors in `maybe_tied` only move if they equal
    another one in `moving` after training, too. The server waits `patience_seconds` for the node's
    reply.
    """

    contents: Mapping[int, RecordDict] = field(metadata={"wire": False})
    arrays_key: str = ARRAYS
    config_key: str = CONFIG
    weighted_by: str = NUM_EXAMPLES
    worker_weight: Literal["load", "equal"] = "load"
    update_norms: Sequence[float] = field(default=(), metadata={"limits": 0})
    moving: Sequence[str] = ()
    maybe_tied: Sequence[str] = field(default=(), metadata={"optional": "unwritten"})
    patience_seconds: float = field(default=600.0, metadata={"limits": 0})

    def to_records(self) -> RecordDict:
        """Return the content of the message, without copies of shared records."""
        records = RecordDict({HOST: ConfigRecord(to_record(self))})
        for rank, content in self.contents.items():
            for name, record in content.items():
                if name == self.config_key:
                    records[f"{rank}/{_ORDER}"] = record
                elif all(other.get(name) is record for other in self.contents.values()):
                    records[f"/{name}"] = record
                else:
                    records[f"{rank}/{name}"] = record
        return records

    @classmethod
    def from_message(cls, message: Message) -> "HostOrders":
        """Read the orders in a message; ProtocolError without valid ones."""
        values = from_wire(cls, message.content.config_records.get(HOST, ConfigRecord()))
        own, shared = by_rank(message.content)
        orders = {rank: records.pop(_ORDER) for rank, records in own.items() if _ORDER in records}
        if not orders or not all(isinstance(order, ConfigRecord) for order in orders.values()):
            raise ProtocolError("the message to a node with several devices holds no orders")
        contents = {
            rank: RecordDict({**shared, **own[rank], values["config_key"]: order})
            for rank, order in orders.items()
        }
        return cls(contents, **values)


@dataclass(frozen=True)
class HostReply:
    """Replies of the workers of one node to their orders, or to a query.

    By local rank, `parts` has the records of each worker's own reply without the averaged ones (at
    least one record each), and `failures` has the failures of the other workers. `shared` has the
    records of the node, such as the averaged model.
    """

    parts: Mapping[int, RecordDict]
    failures: Mapping[int, Failure]
    shared: RecordDict = field(default_factory=RecordDict)

    def to_reply(self, message: Message) -> Message:
        """Return the reply to the message."""
        records = RecordDict({HOST: ConfigRecord()})
        records.update({f"/{name}": record for name, record in self.shared.items()})
        for rank, part in self.parts.items():
            for name, record in part.items():
                records[f"{rank}/{name}"] = record
        for rank, failure in self.failures.items():
            records[f"{rank}/{_FAILURE}"] = ConfigRecord(to_record(failure))
        return Message(records, reply_to=message)

    @classmethod
    def from_content(cls, content: RecordDict) -> "HostReply":
        """Read the content of a reply; ProtocolError if it is not one of such a node."""
        if HOST not in content:
            raise ProtocolError("the reply does not come from a node with several devices")
        own, shared = by_rank(content)
        failures = {
            rank: Failure(**from_wire(Failure, records[_FAILURE]))
            for rank, records in own.items()
            if _FAILURE in records
        }
        parts = {r: RecordDict(records) for r, records in own.items() if r not in failures}
        return cls(parts, failures, RecordDict(shared))


def by_rank(content: RecordDict) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Return the records of each local rank, and those of all, by name without the prefix."""
    own: dict[int, dict[str, Any]] = {}
    shared: dict[str, Any] = {}
    for key, record in content.items():
        if match := _KEY.fullmatch(key):
            records = shared if match[1] is None else own.setdefault(int(match[1]), {})
            records[match[2]] = record
    return dict(sorted(own.items())), shared
