"""Names on the wire, and conversions between dataclasses and Flower's flat records."""

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

QUERY_PROFILE = "query.profile"
EVALUATE = "evaluate"
TRAIN_SUM = "train.sum"

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
MOMENTUM = "momentum"
MOMENTUM_LOADS = "momentum-loads"
LOSSES = "losses"
PROFILE = "profile"
SUMS = "sums"
TRACE_FOLDER = "trace-folder"

SERVER_ROUND = "server-round"
NUM_EXAMPLES = "num-examples"
TRAIN_LOSS = "train-loss"
COMPLETED_STEPS = "completed-steps"
TIMING_KEYS = ("compute-seconds", "started-at", "ended-at", "batch-size", COMPLETED_STEPS)
"""Metrics of a reply that mean nothing as an average."""

AnyRecord = ArrayRecord | ConfigRecord | MetricRecord
Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

_PLAIN = {
    ConfigRecord: frozenset({bool, int, float, str, bytes}),
    MetricRecord: frozenset({int, float}),
}


class ProtocolError(ValueError):
    """A message that is not as this protocol defines it."""


# --- dataclasses to and from records ------------------------------------------------------------


@functools.cache
def _wire_fields(cls: Any) -> dict[str, tuple[str, Any]]:
    """Return key and kind of each field that goes into a record: its type, or an array's dtype."""
    return {
        f.name: (f.metadata.get("key", f.name.replace("_", "-")), f.metadata.get("dtype", f.type))
        for f in fields(cls)
        if f.metadata.get("wire", True)
    }


def to_wire(values: Any) -> dict[str, Any]:
    """Return a dataclass's fields as a record holds them, with keys in kebab-case.

    A field's ``key`` is another name for it, such as Flower's own. A sequence becomes a list, and
    an array whose field has a ``dtype`` the bytes of that dtype.
    Fields with ``wire`` False are left out.
    """
    record = {}
    for name, (key, kind) in _wire_fields(values.__class__).items():
        value = getattr(values, name)
        if isinstance(kind, np.dtype):
            value = value.astype(kind).tobytes()
        elif get_args(kind):
            value = list(value)
        record[key] = value
    return record


def from_wire(cls: Any, record: Any) -> dict[str, Any]:
    """Read a dataclass's fields from a record; see `to_wire`.

    Raises
    ------
    ProtocolError
        If a key is missing or its value has another type.
    """
    return {
        name: _checked(key, record.get(key), kind)
        for name, (key, kind) in _wire_fields(cls).items()
    }


def _checked(key: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, np.dtype):
        return array_from(value, kind, key)
    if elements := get_args(kind):
        if not isinstance(value, list):
            raise ProtocolError(f"the message's {key} are {value!r}, not a list")
        return [_checked(key, element, elements[0]) for element in value]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise ProtocolError(f"the message's {key} is {value!r}, not of type {kind.__name__}")
    return value


def array_from(raw: Any, dtype: np.dtype[Any], what: str) -> npt.NDArray[Any]:
    """Read an array from its bytes; ProtocolError if it is not bytes of whole elements."""
    if not isinstance(raw, bytes) or len(raw) % dtype.itemsize:
        raise ProtocolError(f"the message's {what} are not {dtype.name} bytes")
    return np.frombuffer(raw, dtype)


# --- records without Flower's checks, and by kind or rank ---------------------------------------


def unchecked_record(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Return a ConfigRecord or MetricRecord of these values, without Flower's check of each.

    With many workers these checks take most of the time that the server needs for a message.
    Only values that are not plain numbers, texts or bytes make Flower check all of them.

    Raises
    ------
    TypeError
        If Flower does not take a value.
    """
    if not set(map(type, values.values())) <= _PLAIN[kind]:
        return kind(dict(values))
    record = kind()
    record.__dict__["_data"].update(values)
    return record


def unchecked_content(records: Mapping[str, AnyRecord]) -> RecordDict:
    """Return a RecordDict of these very records, unchecked."""
    content = RecordDict()
    content.__dict__["_data"].update(records)
    return content


def records_of(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """Return a content's records of one kind, by name and in order.

    Flower's ``content.array_records`` and its like are made anew each time, and checked.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def by_rank(content: RecordDict) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Return each local rank's records, by name without the rank, and the records without one.

    A worker has a local rank within its node; a record of its own has a name that ends in ``-`` and
    that rank.
    """
    own: dict[int, dict[str, Any]] = {}
    shared: dict[str, Any] = {}
    for name, record in content.items():
        base, dash, rank = name.rpartition("-")
        if dash and rank.isascii() and rank.isdecimal():
            own.setdefault(int(rank), {})[base] = record
        else:
            shared[name] = record
    return dict(sorted(own.items())), shared
