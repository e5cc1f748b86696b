"""Records made past Flower's checks: the same as Flower's own."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_blsgd.quick_records import quick_content, quick_record, records_of


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (ConfigRecord, {"a": 1, "b": 2.5, "c": "x", "d": b"y", "e": True}),
        (ConfigRecord, {"list": [1, 2], "texts": ["a"]}),
        (ConfigRecord, {}),
        (MetricRecord, {"a": 1, "b": 2.5}),
        (MetricRecord, {"list": [1.0, 2.0]}),
    ],
)
def test_a_record_is_flowers_own(kind: type, values: dict[str, object]) -> None:
    record = quick_record(kind, values)
    assert type(record) is kind
    assert record == kind(dict(values))
    record["later"] = 1  # it still checks what comes later
    with pytest.raises(TypeError):
        record["wrong"] = object()


@pytest.mark.parametrize("value", [object(), np.float32(1), None, [1, "a"], {"a": 1}])
@pytest.mark.parametrize("kind", [ConfigRecord, MetricRecord])
def test_what_flower_refuses_is_refused(kind: type, value: object) -> None:
    with pytest.raises(TypeError):
        quick_record(kind, {"good": 1, "bad": value})


def test_metrics_are_numbers() -> None:
    for value in ("text", b"bytes", True):
        with pytest.raises(TypeError):
            quick_record(MetricRecord, {"x": value})


def test_the_values_are_a_copy() -> None:
    values = {"a": 1}
    record = quick_record(ConfigRecord, values)
    values["a"] = 2
    assert record["a"] == 1


def test_contents_and_their_records() -> None:
    arrays = ArrayRecord({"w": Array(np.ones(2))})
    first, second = MetricRecord({"a": 1}), MetricRecord({"b": 2})
    parts = {"m": first, "arrays": arrays, "c": ConfigRecord({"x": 1}), "n": second}
    content = quick_content(parts)
    assert content == RecordDict(dict(parts))
    assert list(content) == list(parts)
    assert records_of(content, MetricRecord) == {"m": first, "n": second}
    assert list(records_of(content, MetricRecord)) == ["m", "n"]
    assert records_of(content, ArrayRecord)["arrays"] is arrays
    assert records_of(RecordDict(), ArrayRecord) == {}
    assert dict(content.array_records) == records_of(content, ArrayRecord)
