"""Who a worker is: the query before the first round, and its answer."""

from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from ..wire import ProtocolError, from_wire, to_wire
from .names import CONFIG, PROFILE

_PLACES = "places"


@dataclass(frozen=True)
class ProfileQuery:
    """What the strategy asks of a node: who it is, and perhaps how fast.

    Parameters
    ----------
    calibrate : bool (default: False)
        Measure the seconds per step, unless they are known.
    batch_size : int (default: 0)
        Samples per step to measure with; needed with `calibrate`.
    seconds : float (default: 1.0)
        About how long to measure.
    places : tuple of int (default: ())
        Which of a node's devices are to measure, all at once; only for one with several.
    """

    calibrate: bool = False
    batch_size: int = 0
    seconds: float = 1.0
    places: tuple[int, ...] = field(default=(), metadata={"wire": False})

    def to_records(self) -> RecordDict:
        """Return the content of the query's message."""
        config = ConfigRecord(to_wire(self))
        if self.places:
            config[_PLACES] = list(self.places)
        return RecordDict({CONFIG: config})

    @classmethod
    def from_message(cls, message: Message) -> "ProfileQuery":
        """Read a profile query; one without our keys asks only who the node is.

        Raises
        ------
        ProtocolError
            If a key has the wrong type, or there is no batch size to measure with.
        """
        record = message.content.config_records.get(CONFIG, ConfigRecord())
        places: Any = record.get(_PLACES, [])
        if not isinstance(places, list) or not all(type(place) is int for place in places):
            raise ProtocolError(f"the message's places are {places!r}, not whole numbers")
        query = cls(**from_wire(cls, {**to_wire(cls()), **record}), places=tuple(places))
        if query.calibrate and query.batch_size < 1:
            raise ProtocolError(f"batch-size = {query.batch_size}: nothing to measure with")
        return query


@dataclass(frozen=True)
class WorkerProfile:
    """What a node says of its worker before the first round.

    Parameters
    ----------
    device : str
        Such as ``"cuda:0"`` or ``"cpu:0-3"``.
    tier : str (default: "")
        ``"fast"``, ``"slow"``, or empty to leave it to the speed.
    name : str (default: "")
        Its name, if the user gave one.
    partition_id : int (default: -1)
        Its number, if the node has one.
    steps : int (default: 0)
        Local steps per round that the user fixed; 0 for none.
    seconds_per_step : float (default: 0.0)
        How long one step takes; 0 if that is not known.
    seconds_per_step_alone : float (default: 0.0)
        The same while nobody else computes, where both are known; 0 if not.
    data_fingerprint : str (default: "")
        Equal for nodes that hold equal training data; empty if unknown.
    model_fingerprint : str (default: "")
        Equal for nodes whose models have the same tensors; empty if unknown.
    """

    device: str
    tier: str = ""
    name: str = ""
    partition_id: int = -1
    steps: int = 0
    seconds_per_step: float = 0.0
    seconds_per_step_alone: float = 0.0
    data_fingerprint: str = ""
    model_fingerprint: str = ""

    def to_reply(self, message: Message) -> Message:
        """Return the answer to a profile query."""
        return Message(RecordDict({PROFILE: ConfigRecord(to_wire(self))}), reply_to=message)

    @classmethod
    def list_from_reply(cls, reply: Message) -> list["WorkerProfile"]:
        """Read the profiles in an answer: one for an ordinary node.

        Raises
        ------
        ProtocolError
            If there is none, or a key is missing or of the wrong type.
        """
        return list(cls.by_place(reply).values())

    @classmethod
    def by_place(cls, reply: Message) -> dict[int | None, "WorkerProfile"]:
        """Read the profiles in an answer; the one of an ordinary node has no place.

        Raises
        ------
        ProtocolError
            As `list_from_reply`.
        """
        records: dict[int | None, ConfigRecord] = {}
        for name, record in reply.content.config_records.items():
            base, _, place = name.rpartition("-")
            if name == PROFILE:
                records[None] = record
            elif base == PROFILE and place.isascii() and place.isdecimal():
                records[int(place)] = record
        if not records:
            raise ProtocolError("the answer to the profile query holds no profile")
        if None in records and len(records) > 1:
            raise ProtocolError("the answer to the profile query holds profiles of two kinds")
        ordered = sorted(records.items(), key=lambda item: item[0] or 0)
        return {place: cls(**from_wire(cls, record)) for place, record in ordered}
