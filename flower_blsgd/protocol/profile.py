"""The query before the first round, and the profile of each worker in the answer."""

from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from .records import CONFIG, PROFILE, ProtocolError, by_rank, from_wire, to_wire

_RANKS = "ranks"


@dataclass(frozen=True)
class ProfileQuery:
    """Ask a node which workers it has and, with `calibrate`, how fast they are.

    Parameters
    ----------
    calibrate : bool (default: False)
        Measure the seconds per step, unless they are known.
    batch_size : int (default: 0)
        Samples per step to measure with; needed with `calibrate`.
    seconds : float (default: 1.0)
        About how long to measure.
    ranks : tuple of int (default: ())
        Local ranks of the workers that measure, all at once; only for a node with several.
    """

    calibrate: bool = False
    batch_size: int = 0
    seconds: float = 1.0
    ranks: tuple[int, ...] = field(default=(), metadata={"wire": False})

    def to_records(self) -> RecordDict:
        """Return the content of the query's message."""
        config = ConfigRecord(to_wire(self))
        if self.ranks:
            config[_RANKS] = list(self.ranks)
        return RecordDict({CONFIG: config})

    @classmethod
    def from_message(cls, message: Message) -> "ProfileQuery":
        """Read a profile query; without our keys it asks for the profile only.

        Raises
        ------
        ProtocolError
            If a key has the wrong type, or there is no batch size to measure with.
        """
        record = message.content.config_records.get(CONFIG, ConfigRecord())
        ranks: Any = record.get(_RANKS, [])
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise ProtocolError(f"the message's ranks are {ranks!r}, not whole numbers")
        query = cls(**from_wire(cls, {**to_wire(cls()), **record}), ranks=tuple(ranks))
        if query.calibrate and query.batch_size < 1:
            raise ProtocolError(f"batch-size = {query.batch_size}: nothing to measure with")
        return query


@dataclass(frozen=True)
class WorkerProfile:
    """A worker: its device, its name and its speed, as its node reports them.

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
        The same while no other worker computes; 0 if that is not known.
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
        return list(cls.by_local_rank(reply).values())

    @classmethod
    def by_local_rank(cls, reply: Message) -> dict[int | None, "WorkerProfile"]:
        """Read the profiles in an answer by local rank; None for that of an ordinary node.

        Raises
        ------
        ProtocolError
            As `list_from_reply`.
        """
        own, shared = by_rank(reply.content)
        records: dict[int | None, Any] = {
            rank: named[PROFILE] for rank, named in own.items() if PROFILE in named
        }
        if PROFILE in shared:
            if records:
                raise ProtocolError("the answer to the profile query holds profiles of two kinds")
            records[None] = shared[PROFILE]
        if not records:
            raise ProtocolError("the answer to the profile query holds no profile")
        return {rank: cls(**from_wire(cls, record)) for rank, record in records.items()}
