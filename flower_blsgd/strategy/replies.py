"""Check the models and reports in replies."""

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from ..algorithm.tensor_sum import AnyArray, first_not_finite
from ..flower.array_records import FlatTensors, Layout, elements_of, flat_of
from ..protocol import (
    COUNTERS,
    GRAD_SCALER,
    SLOTS,
    NotFiniteError,
    ProtocolError,
    TrainOrder,
    TrainReport,
    state_name,
)
from ..protocol.records import records_of

_MOST_SECONDS = 1e9
"""Upper limit of the seconds of computing; keeps sums and speeds finite."""

_Kind = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype."""

_COUNTER: _Kind = ((), np.dtype(np.float32))
_SCALE: _Kind = ((2,), np.dtype(np.float32))


# --- models ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _kinds_of(layout: Layout) -> tuple[dict[str, _Kind], int]:
    """Return the shape and dtype of each tensor of a model, and the size of all in bytes."""
    kinds = {place.name: (place.shape, place.dtype) for place in layout.places}
    return kinds, sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds.values())


class ModelShape:
    """Names, shapes and dtypes of the tensors of a model, to check replies, and its `num_bytes`."""

    def __init__(self, arrays: ArrayRecord) -> None:
        flat = flat_of(arrays)
        kinds = ((name, array.dtype, tuple(array.shape)) for name, array in arrays.items())
        self._layout = flat.layout if flat else Layout.of(kinds)
        self._tensors, self.num_bytes = _kinds_of(self._layout)

    def checked(self, arrays: ArrayRecord) -> Mapping[str, AnyArray]:
        """Return the tensors of a model by name.

        ProtocolError names the first tensor that is missing, extra, not finite, or has another
        shape or dtype.
        """
        flat = flat_of(arrays)
        if flat is not None and flat.layout == self._layout and not first_not_finite(flat.runs()):
            return FlatTensors(arrays, flat)
        missing = sorted(set(self._tensors) - set(arrays))
        if missing:
            raise ProtocolError(f"its model lacks tensor {missing[0]!r}")
        return _checked(arrays, self._tensors, "its model")

    def checked_momentum(self, arrays: ArrayRecord) -> dict[str, AnyArray]:
        """Return the tensors of an optimizer's state by `state_name`.

        Any tensor may be missing: a parameter may be frozen, and a worker begins with zero for
        missing state. Tensors of a custom optimizer may have any shape and dtype. ProtocolError
        names the first tensor that belongs to no parameter, is not finite, or has a different shape
        or dtype than in torch's SGD and AdamW.
        """
        expected: dict[str, _Kind | None] = {GRAD_SCALER: _SCALE}
        for slots, (name, kind) in itertools.product(SLOTS.values(), self._tensors.items()):
            kinds = (_COUNTER if slot in COUNTERS else kind for slot in slots)
            expected |= zip((state_name(slot, name) for slot in slots), kinds, strict=True)
        for key in arrays:
            if key.partition("/")[2] in self._tensors:
                expected.setdefault(key, None)
        return _checked(arrays, expected, "its optimizer's state")


def _checked(
    arrays: ArrayRecord, expected: Mapping[str, _Kind | None], what: str
) -> dict[str, AnyArray]:
    """Return the tensors in the expected order; some may be missing."""
    held = dict(arrays.items())
    extra = sorted(set(held) - set(expected))
    if extra:
        raise ProtocolError(f"{what} has an extra tensor {extra[0]!r}")
    tensors = {}
    for name, kind in expected.items():
        array = held.get(name)
        if array is None:
            continue
        tensor = elements_of(array)  # the record's own shape and dtype may be wrong
        if kind is not None and (tensor.shape, tensor.dtype) != kind:
            raise ProtocolError(
                f"its tensor {name!r} is {tensor.dtype} of shape {tensor.shape}, "
                f"not {kind[1]} of shape {kind[0]}"
            )
        tensors[name] = tensor
    wrong = first_not_finite(tensors)
    if wrong is not None:
        raise NotFiniteError(
            f"its tensor {wrong!r} is not finite; a smaller learning rate may help"
        )
    return tensors


# --- one worker's reply -----------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedReply:
    """A worker's reply that can be used.

    `tensors` is the model by name, and `momentum` the optimizer's state; empty if it was not sent.
    The workers of a node with several devices share one object of each, the average; the model is
    empty if none of them completed a step. `momentum_loads` has the load behind a tensor of the
    state that not all of these workers sent.
    """

    report: TrainReport
    metrics: MetricRecord
    tensors: Mapping[str, AnyArray]
    momentum: Mapping[str, AnyArray]
    momentum_loads: Mapping[str, float] = field(default_factory=dict)


def check_reply(
    content: RecordDict, order: TrainOrder, model_shape: ModelShape, weighted_by_key: str
) -> CheckedReply:
    """Read and check the reply to an order; it must have the metric `weighted_by_key`.

    ProtocolError gives the reason if the reply cannot be used.
    """
    report, metrics = read_report(content, order, weighted_by_key)
    tensors = model_shape.checked(report.arrays)
    momentum = model_shape.checked_momentum(report.momentum) if report.momentum else {}
    return CheckedReply(report, metrics, tensors, momentum)


def read_report(
    content: RecordDict, order: TrainOrder, weighted_by_key: str
) -> tuple[TrainReport, MetricRecord]:
    """Read the report and the metrics of a reply; see `check_reply`."""
    report = TrainReport.from_content(content, order)
    if report.compute_seconds > _MOST_SECONDS:
        raise ProtocolError(f"its compute_seconds are {report.compute_seconds:g}, out of range")
    metrics = next(iter(records_of(content, MetricRecord).values()))
    weight = metrics.get(weighted_by_key)
    if not isinstance(weight, int | float):
        raise ProtocolError(f"its metrics have no number {weighted_by_key!r}")
    if not (0 < weight < math.inf or (weight == 0 and not report.num_examples)):
        raise ProtocolError(f"its metrics have {weighted_by_key!r} = {weight}, an invalid weight")
    return report, metrics
