"""The query before the first round, and the profile of each worker in the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from .records import CONFIG, PROFILE, ProtocolError, from_wire, to_wire

_LONGEST_NAME = 1000

_ADDED = {"batch-size": 0, "precision": "", "role": "train"}
"""What a node or a checkpoint of an earlier version does not say of a worker."""


@dataclass(frozen=True)
class ProfileQuery:
    """Ask a node, or a worker behind it, which worker it is and, with `calibrate`, how fast.

    Parameters
    ----------
    calibrate : bool (default: False)
        Measure the seconds per step, unless they are known.
    batch_size : int (default: 0)
        Samples per step to measure with; needed with `calibrate`.
    seconds : float (default: 1.0)
        About how long to measure.
    """

    calibrate: bool = False
    batch_size: int = 0
    seconds: float = field(default=1.0, metadata={"limits": 0})

    def to_records(self) -> RecordDict:
        """Return the content of the query's message."""
        return RecordDict({CONFIG: ConfigRecord(to_wire(self))})

    @classmethod
    def from_message(cls, message: Message) -> "ProfileQuery":
        """Read a profile query; without our keys it asks for the profile only.

        ProtocolError if a key has the wrong type, or there is no batch size to measure with.
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
        How long one step of its batch takes; 0 if that is not known.
    seconds_per_step_alone : float (default: 0.0)
        The same while no other worker computes; 0 if that is not known.
    data_fingerprint : str (default: "")
        Equal for nodes that hold equal training data; empty if unknown.
    model_fingerprint : str (default: "")
        Equal for nodes whose models have the same tensors; empty if unknown.
    batch_size : int (default: 0)
        Samples per step of this worker, >= 2, if the user gave one; 0 for the run's.
    precision : str (default: "")
        What it computes with, if the user said so; empty for the run's.
    role : {"train", "evaluate"} (default: "train")
        Whether it trains, or evaluates the model while the others train.
    """

    device: str
    tier: str = field(default="", metadata={"limits": ("", "fast", "slow")})
    name: str = ""
    partition_id: int = field(default=-1, metadata={"limits": -1})
    steps: int = field(default=0, metadata={"limits": 0})
    seconds_per_step: float = field(default=0.0, metadata={"limits": 0})
    seconds_per_step_alone: float = field(default=0.0, metadata={"limits": 0})
    data_fingerprint: str = ""
    model_fingerprint: str = ""
    batch_size: int = field(default=0, metadata={"limits": 0})
    precision: str = ""
    role: str = field(default="train", metadata={"limits": ("train", "evaluate")})

    def to_reply(self, message: Message) -> Message:
        """Return the answer to a profile query."""
        return Message(RecordDict({PROFILE: ConfigRecord(to_wire(self))}), reply_to=message)

    @classmethod
    def from_content(cls, content: RecordDict) -> "WorkerProfile":
        """Read the content of an answer; ProtocolError if it holds no profile, or a wrong one."""
        record = content.config_records.get(PROFILE)
        if record is None:
            raise ProtocolError("the answer to the profile query holds no profile")
        return cls.from_record(record)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "WorkerProfile":
        """Read a profile; what an earlier version does not say has its default.

        ProtocolError if a value is missing or wrong, or a name cannot be printed.
        """
        profile = cls(**from_wire(cls, {**_ADDED, **record}))
        if profile.batch_size == 1:
            raise ProtocolError("a worker's batch of 1 sample is too small; 2 is the least")
        # They stand in every log and result.
        for text in (profile.device, profile.name, profile.precision):
            if not text.isprintable() or len(text) > _LONGEST_NAME:
                raise ProtocolError(f"a worker cannot be called {text!r:.80}")
        return profile
