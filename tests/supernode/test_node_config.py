"""The text of a node config, read back as Flower reads it."""

import pytest
from flwr.common.config import parse_config_args
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.errors import UsageError
from flower_blsgd.supernode.node_config import Value, node_config_text, read_node_config


def test_written_as_flower_takes_it() -> None:
    config = {"device": "cpu:0-3", "steps": 3, "slowdown": 4.0, "fast": True, "name": "it's"}
    text = "device='cpu:0-3' steps=3 slowdown=4.0 fast=true name=\"it's\""
    assert node_config_text(config) == text
    assert parse_config_args([text]) == config


texts = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), max_size=20)
values = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), texts) | st.floats(
    allow_nan=False, allow_infinity=False
)


@given(st.dictionaries(st.from_regex(r"[a-z][a-z-]{0,9}", fullmatch=True), values, min_size=1))
def test_what_is_written_is_read_by_flower_or_refused(config: dict[str, Value]) -> None:
    try:
        text = node_config_text(config)
    except UsageError:
        assert any(
            isinstance(v, str) and (not v.isprintable() or ("'" in v and '"' in v))
            for v in config.values()
        )
    else:
        found = parse_config_args([text])
        assert found == config
        assert [type(value) for value in found.values()] == [type(v) for v in config.values()]


def test_further_keys() -> None:
    text = "partition-id=3 site='north west' weight=0.5 spare=false"
    expected = {"partition-id": 3, "site": "north west", "weight": 0.5, "spare": False}
    assert read_node_config(text, ["device"]) == expected
    assert read_node_config("", ["device"]) == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("partition-id", "cannot be read"),
        ("site=north", "with texts in quotes"),
        ("a=1 b", "cannot be read"),
        ("a=1 a=2", "cannot be read"),
        ("device='cpu'", "--node-config device"),
        ("ids=[1,2]", "--node-config ids"),
    ],
)
def test_further_keys_that_are_none(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as refused:
        read_node_config(text, ["device", "superlink"])
    assert "\n" not in str(refused.value)
