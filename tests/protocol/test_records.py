"""Dataclasses to and from records, and records made without Flower's checks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_blsgd.fields import to_record
from flower_blsgd.protocol import ProtocolError
from flower_blsgd.protocol.records import (
    from_wire,
    records_of,
    unchecked_content,
    unchecked_record,
)


@dataclass
class Example:
    """One field of each kind."""

    max_steps: int = field(metadata={"limits": 1})
    seconds: float = field(metadata={"limits": 0})
    loss: float = field(metadata={"limits": None})
    name: str
    tier: Literal["", "slow"]
    wanted: bool
    norms: Sequence[float]
    arrays: object = field(default=None, metadata={"wire": False})


EXAMPLE = Example(3, 0.5, 2.0, "x", "slow", True, (1.0, 2.0))


def test_dataclass_survives_a_record() -> None:
    record = ConfigRecord(to_record(EXAMPLE))
    assert set(record) == {"max-steps", "seconds", "loss", "name", "tier", "wanted", "norms"}
    found = from_wire(Example, record)
    assert found == {
        "max_steps": 3,
        "seconds": 0.5,
        "loss": 2.0,
        "name": "x",
        "tier": "slow",
        "wanted": True,
        "norms": [1.0, 2.0],
    }
    whole = from_wire(Example, {**record, "seconds": 2, "norms": [1], "loss": np.inf})
    assert (type(whole["seconds"]), type(whole["norms"][0])) == (float, float)
    assert whole["loss"] == np.inf


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("max-steps", value) for value in (3.0, "3", True, None, 0, 2**63)],
        *[("seconds", value) for value in ("fast", True, None, -0.1, np.nan, np.inf, 10**400)],
        *[("name", value) for value in (1, b"x", None)],
        *[("tier", value) for value in ("fast", 1, None)],
        *[("wanted", value) for value in (1, "yes", None)],
        *[("norms", value) for value in (1.0, ["a"], [True], None)],
    ],
)
def test_value_that_is_missing_or_not_allowed_is_refused_by_name(key: str, value: Any) -> None:
    record = to_record(EXAMPLE) | {key: value}
    if value is None:
        del record[key]
    with pytest.raises(ProtocolError, match=key):
        from_wire(Example, record)


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
