"""Names on the wire, and Flower's records without its checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ..fields import FieldError, from_record
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
OWN_MODEL = "own-model"
MOMENTUM_LOADS = "momentum-loads"
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
TIMING_KEYS = {COMPLETED_STEPS, MOMENTUM_ZEROED, SKIPPED_STEPS, "samples", "learning-rate"}
TIMING_KEYS |= {"compute-seconds", "started-at", "ended-at", "batch-size", "traced"}
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


def from_wire(cls: Any, record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass from a record; ProtocolError if one is invalid."""
    try:
        return from_record(cls, record)
    except FieldError as error:
        raise ProtocolError(f"the message's {error}") from None


# --- records without Flower's checks, and by kind -----------------------------------------------


def unchecked_record(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Return a ConfigRecord or MetricRecord of these values, without Flower's checks.

    With many workers, the checks take most of the server's time for a message. They run only if a
    value is not a plain number, text or bytes; then TypeError if Flower does not accept it.
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
