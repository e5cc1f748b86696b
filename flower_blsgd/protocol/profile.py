"""The query before the first round, and the profile of each worker in the answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from .records import CONFIG, PROFILE, ProtocolError, by_rank, from_wire, to_wire


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
    ranks : sequence of int (default: [])
        Local ranks of the workers that measure, all at once; only for a node with several.
    """

    calibrate: bool = False
    batch_size: int = 0
    seconds: float = 1.0
    ranks: Sequence[int] = field(default_factory=list)

    def to_records(self) -> RecordDict:
        """Return the content of the query's message."""
        return RecordDict({CONFIG: ConfigRecord(to_wire(self))})

    @classmethod
    def from_message(cls, message: Message) -> "ProfileQuery":
        """Read a profile query; without our keys it asks for the profile only.

        Raises
        ------
        ProtocolError
            If a key has the wrong type, or there is no batch size to measure with.
        """
        record = message.content.config_records.get(CONFIG, ConfigRecord())
        query = cls(**from_wire(cls, {**to_wire(cls()), **record}))
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
    def by_local_rank(cls, reply: Message) -> dict[int | None, "WorkerProfile"]:
        """Read the profiles in an answer by local rank; None for that of an ordinary node.

        Raises
        ------
        ProtocolError
            If there is none, or a key is missing or of the wrong type.
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
