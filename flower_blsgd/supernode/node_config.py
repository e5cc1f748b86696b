"""The text of ``flower-supernode --node-config``."""

import re
import tomllib
from collections.abc import Collection, Mapping

from ..errors import UsageError

Value = bool | float | int | str

# As Flower reads it: pairs separated by spaces, texts in quotes of one kind.
_PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)")


def node_config_text(values: Mapping[str, Value]) -> str:
    """Write a node config as Flower reads it.

    >>> node_config_text({"device": "cpu:0", "steps": 3, "slowdown": 4.0})
    "device='cpu:0' steps=3 slowdown=4.0"

    Raises
    ------
    UsageError
        If a text holds quotes of both kinds: Flower has no way to write it.
    """
    return " ".join(f"{key}={_written(key, value)}" for key, value in values.items())


def _written(key: str, value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    if not value.isprintable() or ("'" in value and '"' in value):
        raise UsageError(
            f"{key} = {value!r} cannot be in a node config; use no control characters, and "
            "quotes of one kind"
        )
    if "'" not in value:
        return f"'{value}'"
    escaped = value.replace("\\", "\\\\")
    return f'"{escaped}"'


def read_node_config(text: str, ours: Collection[str]) -> dict[str, Value]:
    """Read further keys that the user gives, as ``KEY=VALUE`` pairs.

    Parameters
    ----------
    text : str
        The pairs; empty: none.
    ours : collection of str
        Keys that the command writes itself.

    Raises
    ------
    UsageError
        If a pair cannot be read, or its key is one of ours.
    """
    rest = _PAIR.sub("", text).strip()
    lines = "\n".join(f"{key} = {value}" for key, value in _PAIR.findall(text))
    try:
        values = tomllib.loads(lines)
    except tomllib.TOMLDecodeError:
        values = {}
    if rest or (text.strip() and not values):
        raise UsageError(
            f"--node-config {text!r} cannot be read; write KEY=VALUE pairs with texts in quotes: "
            "\"partition-id=3 site='north'\""
        )
    for key, value in values.items():
        if key in ours:
            raise UsageError(
                f"--node-config {key}: blsgd supernode writes this key itself; use --workers, "
                "--superlink and --name"
            )
        if not isinstance(value, bool | float | int | str):
            raise UsageError(f"--node-config {key} = {value!r} must be a number, a text or a bool")
    return values
