"""A slice of the models to add up, for workers that do not train."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from ..wire import ProtocolError
from .names import ARRAYS, CONFIG, METRICS

AnyArray = npt.NDArray[Any]

_WEIGHTS = "weights"
_STARTED_AT, _ENDED_AT = "started-at", "ended-at"


@dataclass(frozen=True)
class SumOrder:
    """One worker's slice of all models.

    Parameters
    ----------
    weights : tuple of float
        One per model, >= 0, adding up to 1.
    slices : tuple of ArrayRecord
        The slice of each model: one flat array for each dtype of the model, by its name.
    """

    weights: tuple[float, ...]
    slices: tuple[ArrayRecord, ...]

    def models(self) -> list[dict[str, AnyArray]]:
        """Return the slices as arrays by name."""
        return [{name: a.numpy() for name, a in record.items()} for record in self.slices]

    def to_records(self) -> RecordDict:
        """Return the content of the order's message; the slices are shared, not copied."""
        records = RecordDict({CONFIG: ConfigRecord({_WEIGHTS: list(self.weights)})})
        for place, record in enumerate(self.slices):
            records[f"{ARRAYS}-{place}"] = record
        return records

    @classmethod
    def from_message(cls, message: Message) -> "SumOrder":
        """Read the order in a message to sum.

        Raises
        ------
        ProtocolError
            If there are no weights, or not a slice for each.
        """
        config = message.content.config_records.get(CONFIG, ConfigRecord())
        weights = config.get(_WEIGHTS)
        if not isinstance(weights, list) or not all(isinstance(w, float) for w in weights):
            raise ProtocolError("the message to sum holds no weights")
        arrays = message.content.array_records
        names = [f"{ARRAYS}-{place}" for place in range(len(weights))]
        if not names or set(names) != set(arrays):
            raise ProtocolError(f"{len(weights)} weights came with {len(arrays)} slices")
        return cls(tuple(map(float, weights)), tuple(arrays[name] for name in names))


@dataclass(frozen=True)
class SumReport:
    """The slice, added up.

    Parameters
    ----------
    arrays : ArrayRecord
        As in the order.
    started_at, ended_at : float
        Unix time in seconds.
    """

    arrays: ArrayRecord
    started_at: float
    ended_at: float

    def to_reply(self, message: Message) -> Message:
        """Return the answer to a message to sum."""
        times = MetricRecord({_STARTED_AT: self.started_at, _ENDED_AT: self.ended_at})
        return Message(RecordDict({ARRAYS: self.arrays, METRICS: times}), reply_to=message)

    @classmethod
    def from_reply(cls, reply: Message, expected: Sequence[ArrayRecord]) -> "SumReport":
        """Read an answer, and check it against a slice that it is the sum of.

        Raises
        ------
        ProtocolError
            If names, shapes or dtypes differ, a sum is not finite, or the times are missing.
        """
        arrays = reply.content.array_records.get(ARRAYS, ArrayRecord())
        # What the arrays hold counts, not what they say that they hold.
        tensors = {name: array.numpy() for name, array in arrays.items()}
        wanted = {name: array.numpy() for name, array in expected[0].items()}
        if _kinds(tensors) != _kinds(wanted):
            raise ProtocolError("its sums have other shapes than what was to be added up")
        if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
            raise ProtocolError("its sums are not finite")
        times = reply.content.metric_records.get(METRICS, MetricRecord())
        started_at, ended_at = times.get(_STARTED_AT), times.get(_ENDED_AT)
        if not isinstance(started_at, float) or not isinstance(ended_at, float):
            raise ProtocolError("its answer does not say how long it summed")
        return cls(arrays, started_at, ended_at)


def _kinds(tensors: Mapping[str, AnyArray]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
