"""Flower's records, made and read without its checks of every key and value.

With a thousand workers these checks take most of the time that the server needs for a message.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

AnyRecord = ArrayRecord | ConfigRecord | MetricRecord
Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

_PLAIN = {
    ConfigRecord: frozenset({bool, int, float, str, bytes}),
    MetricRecord: frozenset({int, float}),
}


def quick_record(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Return a ConfigRecord or MetricRecord of these values.

    Plain values go in as they are; any other makes Flower look at all of them.

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


def quick_content(records: Mapping[str, AnyRecord]) -> RecordDict:
    """Return a RecordDict of these very records."""
    content = RecordDict()
    content.__dict__["_data"].update(records)
    return content


def records_of(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """Return a content's records of one kind, by name and in order.

    Flower's ``content.array_records`` and its like are made anew each time, and checked.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}
