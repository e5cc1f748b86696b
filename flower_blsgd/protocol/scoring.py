"""Samples whose losses are to be computed, forward only, and these losses."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from .records import ARRAYS, CONFIG, LOSSES, SERVER_ROUND, ProtocolError, from_wire, to_wire
from .training import INDEX_DTYPE, LOSS_DTYPE, check_finite


@dataclass(frozen=True)
class ScoreOrder:
    """The samples that one worker scores, and the model that it scores them with.

    Parameters
    ----------
    round : int
        The round after which this is the global model.
    indices : numpy.ndarray
        int32; of the training set.
    arrays : ArrayRecord
        The model: every tensor of its state dict.
    """

    round: int = field(metadata={"key": SERVER_ROUND, "limits": 0})
    indices: npt.NDArray[np.int32] = field(metadata={"dtype": INDEX_DTYPE, "limits": 0})
    arrays: ArrayRecord = field(metadata={"wire": False})

    def to_records(self) -> RecordDict:
        """Return the content of the order's message; `arrays` itself is shared, not copied."""
        return RecordDict({ARRAYS: self.arrays, CONFIG: ConfigRecord(to_wire(self))})

    @classmethod
    def from_message(cls, message: Message) -> "ScoreOrder":
        """Read the order in a message; ProtocolError if it holds none, or a wrong value."""
        config = message.content.config_records.get(CONFIG, ConfigRecord())
        arrays = message.content.array_records.get(ARRAYS)
        if arrays is None:
            raise ProtocolError(f"the message to score holds no model {ARRAYS!r}")
        return cls(**from_wire(cls, config), arrays=arrays)


@dataclass(frozen=True)
class ScoreReport:
    """The losses of the samples of a `ScoreOrder`: float32, in the order of its indices."""

    losses: npt.NDArray[np.float32] = field(metadata={"dtype": LOSS_DTYPE})

    def to_reply(self, message: Message) -> Message:
        """Return the reply to a message to score."""
        return Message(RecordDict({LOSSES: ConfigRecord(to_wire(self))}), reply_to=message)

    @classmethod
    def from_content(cls, content: RecordDict, order: ScoreOrder) -> "ScoreReport":
        """Read a reply's content; ProtocolError without a finite loss for each sample."""
        report = cls(**from_wire(cls, content.config_records.get(LOSSES, ConfigRecord())))
        if len(report.losses) != len(order.indices):
            raise ProtocolError(
                f"{len(order.indices)} samples were to be scored, but there are "
                f"{len(report.losses)} losses"
            )
        check_finite(report.losses)
        return report
