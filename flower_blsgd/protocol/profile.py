"""The profile query before the first round, and the profile of each worker in the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from ..devices.worker_spec import OPTIONS, WorkerOptions, WorkerSpec
from ..fields import to_record
from .failure import ProtocolError
from .records import CONFIG, PROFILE, from_wire

_LONGEST_NAME = 1000


@dataclass(frozen=True)
class ProfileQuery:
    """Query for the profile of a worker and, with `calibrate`, its speed.

    The seconds per step are measured if they are unknown, in about `seconds`, with steps of
    `batch_size` samples, which must then be given.
    """

    calibrate: bool = False
    batch_size: int = 0
    seconds: float = field(default=1.0, metadata={"limits": 0})

    def to_records(self) -> RecordDict:
        """Return the content of the query's message."""
        return RecordDict({CONFIG: ConfigRecord(to_record(self))})

    @classmethod
    def from_message(cls, message: Message) -> "ProfileQuery":
        """Read a profile query. Without our keys it is a query for the profile only.

        ProtocolError if a value has the wrong type, or the batch size is missing.
        """
        record = message.content.config_records.get(CONFIG, ConfigRecord())
        query = cls(**from_wire(cls, {**to_record(cls()), **record}))
        if query.calibrate and query.batch_size < 1:
            raise ProtocolError(f"batch-size = {query.batch_size}: must be at least 1 to measure")
        return query


@dataclass(frozen=True)
class WorkerProfile(WorkerOptions):
    """A worker as its node reports it: device, options, and fingerprints of its data and model.

    Provisional: may change in any minor version.

    Parameters
    ----------
    device : str
        Device with its cores: ``"cuda:0"``, ``"cpu:0-3"``.
    partition_id : int (default: -1)
        Number of the node; -1 if it has none.
    data_fingerprint : str (default: "")
        Equal for nodes with equal training data; empty if unknown.
    model_fingerprint : str (default: "")
        Equal for nodes whose models have the same tensors; empty if unknown.
    **options
        The fields of `WorkerOptions`. ``seconds_per_step`` is given by the user or, if the query
        asks for it, measured; 0 if unknown.
    """

    device: str
    partition_id: int = field(default=-1, kw_only=True, metadata={"limits": -1})
    data_fingerprint: str = field(default="", kw_only=True)
    model_fingerprint: str = field(default="", kw_only=True)

    @classmethod
    def of(cls, worker: WorkerSpec, partition_id: int = -1) -> "WorkerProfile":
        """Return the profile of a worker: its device and options."""
        options = {option.field: getattr(worker, option.field) for option in OPTIONS.values()}
        return cls(worker.device_with_cores, partition_id=partition_id, **options)

    def to_reply(self, message: Message) -> Message:
        """Return the answer to a profile query."""
        return Message(RecordDict({PROFILE: ConfigRecord(to_record(self))}), reply_to=message)

    @classmethod
    def from_content(cls, content: RecordDict) -> "WorkerProfile":
        """Read the content of an answer; ProtocolError if it holds no profile or an invalid one."""
        record = content.config_records.get(PROFILE)
        if record is None:
            raise ProtocolError("the answer to the profile query holds no profile")
        return cls.from_record(record)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "WorkerProfile":
        """Read a profile.

        A missing option has its default. ProtocolError if another value is missing or one is
        invalid, or a text cannot be printed in logs.
        """
        profile = cls(**from_wire(cls, record))
        for key, option in OPTIONS.items():
            if not option.accepts(value := getattr(profile, option.field)):
                raise ProtocolError(f"a worker's {key} is {value!r:.80}; expected {option.values}")
        for text in (profile.device, profile.name):
            if not text.isprintable() or len(text) > _LONGEST_NAME:
                raise ProtocolError(f"a worker has an invalid name or device: {text!r:.80}")
        return profile
