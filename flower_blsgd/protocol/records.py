"""Names on the wire, and conversions between dataclasses and Flower's flat records."""

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, cast

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


@functools.cache
def _wire_names(cls: Any) -> dict[str, tuple[str, type]]:
    return {
        f.name: (f.name.replace("_", "-"), cast(type, f.type))
        for f in fields(cls)
        if f.metadata.get("wire", True)
    }


def to_wire(values: Any) -> dict[str, Any]:
    """Return a dataclass's fields that go into a record, with keys in kebab-case."""
    return {key: getattr(values, name) for name, (key, _) in _wire_names(values.__class__).items()}


def from_wire(cls: Any, record: Any) -> dict[str, Any]:
    """Read a dataclass's fields from a record, by their keys in kebab-case.

    Raises
    ------
    ProtocolError
        If a key is missing or its value has another type.
    """
    values = {}
    for name, (key, expected) in _wire_names(cls).items():
        value = record.get(key)
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, expected) or isinstance(value, bool) != (expected is bool):
            raise ProtocolError(
                f"the message's {key} is {value!r}, not of type {expected.__name__}"
            )
        values[name] = value
    return values


def array_from(raw: Any, dtype: np.dtype[Any], what: str) -> npt.NDArray[Any]:
    """Read an array from its bytes; ProtocolError if it is not bytes of whole elements."""
    if not isinstance(raw, bytes) or len(raw) % dtype.itemsize:
        raise ProtocolError(f"the message's {what} are not {dtype.name} bytes")
    return np.frombuffer(raw, dtype)


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
