"""Dataclasses to and from records and JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
from flwr.app import ConfigRecord

from flower_blsgd.fields import FieldError, from_json, from_record, to_json, to_record


@dataclass
class Example:
    """One field of each kind."""

    max_steps: int = field(metadata={"limits": 1})
    round: int = field(metadata={"limits": 0})
    seconds: float = field(metadata={"limits": 0})
    loss: float = field(metadata={"limits": None})
    name: str
    tier: Literal["", "slow"]
    wanted: bool
    norms: Sequence[float]
    arrays: object = field(default=None, metadata={"wire": False})


EXAMPLE = Example(3, 0, 0.5, 2.0, "x", "slow", True, (1.0, 2.0))


def test_dataclass_survives_a_record() -> None:
    record = ConfigRecord(to_record(EXAMPLE))
    assert set(record) == {
        "max-steps",
        "round",
        "seconds",
        "loss",
        "name",
        "tier",
        "wanted",
        "norms",
    }
    found = from_record(Example, record)
    assert found == {
        "max_steps": 3,
        "round": 0,
        "seconds": 0.5,
        "loss": 2.0,
        "name": "x",
        "tier": "slow",
        "wanted": True,
        "norms": [1.0, 2.0],
    }
    whole = from_record(Example, {**record, "seconds": 2, "norms": [1], "loss": np.inf})
    assert (type(whole["seconds"]), type(whole["norms"][0])) == (float, float)
    assert whole["loss"] == np.inf


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("max-steps", value) for value in (3.0, "3", True, None, 0, 2**63)],
        *[("round", value) for value in (-1, -(2**63))],
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
    with pytest.raises(FieldError, match=key):
        from_record(Example, record)


@dataclass
class Part:
    count: int
    share: float | None


@dataclass
class Whole:
    loss: float
    parts: tuple[Part, ...]
    first: Part


def test_null_is_nan_or_none_in_json() -> None:
    whole = Whole(0.5, (Part(1, 2.0), Part(2, None)), Part(3, None))
    values = json.loads(json.dumps(to_json(whole)))
    assert from_json(Whole, values) == whole
    assert to_json({"a": (math.nan, -math.inf, 1.5, None)}) == {"a": [None, None, 1.5, None]}
    assert math.isnan(from_json(Whole, values | {"loss": None, "more": 1}).loss)
    wrong: list[Mapping[str, Any]] = [{"first": None}, {"parts": [[1]]}, {"parts": None}]
    for value in (*wrong, {"loss": "x"}, {"first": {"count": 1.5, "share": None}}):
        with pytest.raises(FieldError, match=f"^{next(iter(value))} is .*, but must be "):
            from_json(Whole, values | value)
    with pytest.raises(FieldError):
        from_json(Whole, [values])  # type: ignore[arg-type]
