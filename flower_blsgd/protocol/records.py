"""Names on the wire, and conversions between dataclasses and Flower's flat records."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ..flower.internals import filled_unchecked
from .failure import ProtocolError

QUERY_PROFILE = "query.profile"
QUERY_MOMENTUM = "query.momentum"
EVALUATE = "evaluate"
TRAIN_SUM = "train.sum"

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
MOMENTUM = "momentum"
LOSSES = "losses"
PROFILE = "profile"
SUMS = "sums"
TRACE_FOLDER = "trace-folder"

SERVER_ROUND = "server-round"
NUM_EXAMPLES = "num-examples"
TRAIN_LOSS = "train-loss"
COMPLETED_STEPS = "completed-steps"
MOMENTUM_ZEROED = "momentum-zeroed"
SKIPPED_STEPS = "skipped-steps"
GRAD_SCALER = "grad-scaler"
TIMING_KEYS = (
    *("compute-seconds", "started-at", "ended-at", "batch-size", "traced"),
    *(COMPLETED_STEPS, MOMENTUM_ZEROED, SKIPPED_STEPS, "samples", "learning-rate"),
)
"""Metrics of a reply whose average is meaningless."""

AnyRecord = ArrayRecord | ConfigRecord | MetricRecord
Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

_PLAIN = {
    ConfigRecord: frozenset({bool, int, float, str, bytes}),
    MetricRecord: frozenset({int, float}),
}


@dataclass(frozen=True)
class Keys:
    """Names of the records in a training message, as arguments of Flower's strategies set them.

    `config` has the settings of an order. Every reply must have the metric `weighted_by`.
    """

    arrays: str = ARRAYS
    config: str = CONFIG
    weighted_by: str = NUM_EXAMPLES


# --- dataclasses to and from records ------------------------------------------------------------


@functools.cache
def _wire_fields(cls: Any) -> dict[str, tuple[str, Any, Any]]:
    """Return key, type and limits of each field that goes into a record."""
    found: dict[str, tuple[str, Any, Any]] = {}
    for f in fields(cls):
        if f.metadata.get("wire", True):
            kind, limits = f.type, f.metadata.get("limits", -math.inf)
            if get_origin(kind) is Literal:
                kind, limits = str, get_args(kind)
            found[f.name] = f.metadata.get("key", f.name.replace("_", "-")), kind, limits
    return found


def to_wire(values: Any) -> dict[str, Any]:
    """Return the values of a record that holds a dataclass, with keys in kebab-case.

    A sequence becomes a list. The metadata of a field may have:

    - ``key``: its key in the record, such as a key of Flower's;
    - ``wire``: False leaves the field out;
    - ``limits``: the smallest allowed number, or all allowed values. None also allows nan and
      infinity.

    A field with a ``Literal`` type must be one of its texts.
    """
    record = {}
    for name, (key, kind, _) in _wire_fields(values.__class__).items():
        value = getattr(values, name)
        if get_args(kind) and not isinstance(kind, UnionType):
            value = list(value)
        record[key] = value
    return record


def from_wire(cls: Any, record: Any) -> dict[str, Any]:
    """Read the fields of a dataclass from a record; see `to_wire`.

    ProtocolError if a key is missing, or its value has the wrong type, is not finite or not
    allowed.
    """
    return {
        name: _checked(key, record.get(key), kind, limits)
        for name, (key, kind, limits) in _wire_fields(cls).items()
    }


def _checked(key: str, value: Any, kind: Any, limits: Any) -> Any:
    if isinstance(kind, UnionType):  # an optional one
        return None if value is None else _checked(key, value, get_args(kind)[0], limits)
    if elements := get_args(kind):
        if not isinstance(value, list):
            raise ProtocolError(f"the message's {key} are {value!r:.80}, not a list")
        return [_checked(key, element, elements[0], limits) for element in value]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**63 else math.inf
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise ProtocolError(f"the message's {key} is {value!r:.80}, not of type {kind.__name__}")
    allowed = True
    if isinstance(limits, tuple):
        allowed = value in limits
    elif kind is int:  # those that fit on the wire
        allowed = max(limits, -(2**63)) <= value < 2**63
    elif kind is float and limits is not None:
        allowed = limits <= value and math.isfinite(value)
    if not allowed:
        raise ProtocolError(f"the message's {key} is {value!r:.80}, out of its range")
    return value


# --- records without Flower's checks, and by kind -----------------------------------------------


def unchecked_record(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Return a ConfigRecord or MetricRecord of these values, without Flower's checks.

    With many workers, the checks take most of the server's time for a message. They run only if a
    value is not a plain number, text or bytes.

    TypeError if Flower does not accept a value.
    """
    if not set(map(type, values.values())) <= _PLAIN[kind]:
        return kind(dict(values))
    return filled_unchecked(kind(), values)


def unchecked_content(records: Mapping[str, AnyRecord]) -> RecordDict:
    """Return a RecordDict of these records without Flower's checks."""
    return filled_unchecked(RecordDict(), records)


def records_of(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """Return the records of one kind by name, in order.

    Flower's ``content.array_records`` and similar views are built and checked on each access.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}
