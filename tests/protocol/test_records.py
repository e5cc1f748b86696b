"""Records made without Flower's checks."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_blsgd.protocol.records import (
    records_of,
    unchecked_content,
    unchecked_record,
)


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
def test_record_is_flowers_own(kind: type, values: dict[str, object]) -> None:
    record = unchecked_record(kind, values)
    assert type(record) is kind
    assert record == kind(dict(values))
    values["more"] = 2  # it has a copy
    assert "more" not in record


@pytest.mark.parametrize(
    ("kind", "value"),
    [(ConfigRecord, v) for v in (object(), np.float32(1), None, [1, "a"])]
    + [(MetricRecord, v) for v in (object(), None, "text", b"bytes", True)],
)
def test_value_that_flower_refuses_is_refused(kind: type, value: object) -> None:
    with pytest.raises(TypeError):
        unchecked_record(kind, {"good": 1, "bad": value})


def test_content_and_its_records() -> None:
    arrays = ArrayRecord({"w": Array(np.ones(2))})
    first, second = MetricRecord({"a": 1}), MetricRecord({"b": 2})
    parts = {"m": first, "arrays": arrays, "c": ConfigRecord({"x": 1}), "n": second}
    content = unchecked_content(parts)
    assert content == RecordDict(dict(parts))
    assert list(content) == list(parts)
    assert list(records_of(content, MetricRecord).items()) == [("m", first), ("n", second)]
    assert records_of(content, ArrayRecord)["arrays"] is arrays
    assert records_of(RecordDict(), ArrayRecord) == {}
