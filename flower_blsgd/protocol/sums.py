"""Order to add up slices of models, and its report (parameter-server reduce)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from ..fields import to_record
from .failure import ProtocolError
from .records import ARRAYS, CONFIG, METRICS, from_wire


@dataclass(frozen=True)
class SumOrder:
    """Order to compute the weighted sum of a slice of all models.

    There is one weight >= 0 per model; they add up to 1. `slices` has a record of flat arrays for
    each model, with the same names.
    """

    weights: Sequence[float] = field(metadata={"limits": 0})
    slices: Sequence[ArrayRecord] = field(metadata={"wire": False})

    def to_records(self) -> RecordDict:
        """Return the content of the order's message; the slices are shared, not copied."""
        records = RecordDict({CONFIG: ConfigRecord(to_record(self))})
        for i, record in enumerate(self.slices):
            records[f"{ARRAYS}-{i}"] = record
        return records

    @classmethod
    def from_message(cls, message: Message) -> "SumOrder":
        """Read the order in a message to sum.

        ProtocolError without weights that add up to 1, and one slice for each.
        """
        config = message.content.config_records.get(CONFIG, ConfigRecord())
        values = from_wire(cls, config)
        arrays = message.content.array_records
        names = [f"{ARRAYS}-{i}" for i in range(len(values["weights"]))]
        if set(names) != set(arrays):
            raise ProtocolError(f"{len(names)} weights came with {len(arrays)} slices")
        if not math.isclose(sum(values["weights"]), 1.0, rel_tol=1e-6):
            raise ProtocolError(f"the weights add up to {sum(values['weights'])}, not to 1")
        return cls(**values, slices=tuple(arrays[name] for name in names))


@dataclass(frozen=True)
class SumReport:
    """Weighted sum of a slice of all models, named as in the order, and Unix times in seconds."""

    arrays: ArrayRecord = field(metadata={"wire": False})
    started_at: float = field(metadata={"limits": 0})
    ended_at: float = field(metadata={"limits": 0})

    def to_reply(self, message: Message) -> Message:
        """Return the reply to a message to sum."""
        times = MetricRecord(to_record(self))
        return Message(RecordDict({ARRAYS: self.arrays, METRICS: times}), reply_to=message)

    @classmethod
    def from_content(cls, content: RecordDict) -> "SumReport":
        """Read the content of a reply; ProtocolError without times. Its arrays are not checked."""
        times = content.metric_records.get(METRICS, MetricRecord())
        arrays = content.array_records.get(ARRAYS, ArrayRecord())
        return cls(arrays, **from_wire(cls, times))
