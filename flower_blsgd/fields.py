"""Fields of dataclasses: one reader for messages, checkpoints, results and settings.

The metadata of a field may have:

- ``key``: its key in a record, such as a key of Flower's; by default its name in kebab-case;
- ``wire``: False leaves the field out of records;
- ``optional``: True if a record of another version may lack the key, which means the default;
  ``"unwritten"`` also leaves the default out, so that other versions can read the record;
- ``limits``: the smallest allowed number, or all allowed values. None also allows nan and infinity.

A field with a ``Literal`` type must be one of its texts.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin

Read = Callable[[Any], Any]
"""Returns a value as the type of a field; raises FieldError."""

_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class FieldError(ValueError):
    """A value that a field cannot have; the message is what it must be."""


def to_record(values: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by key; sequences become lists."""
    record = {}
    for name, key, _, optional in _fields(values.__class__, False):
        value = getattr(values, name)
        if optional == "unwritten" and value == getattr(values.__class__, name):
            continue
        record[key] = list(value) if isinstance(value, list | tuple) else value
    return record


def from_record(cls: Any, record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass from a record, whose other keys are ignored.

    Optional fields that are missing are left out. FieldError if another key is missing, or a value
    has the wrong type, is not finite or not allowed.
    """
    return _read(cls, record, False)


def from_json(cls: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass from its fields by name; null becomes nan, or None.

    FieldError if a field is missing or has the wrong type.
    """
    return cls(**_read(cls, values, True))


def to_json(value: Any) -> Any:
    """Return a value, such as a dataclass, as JSON can hold it: nan and infinity become null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _read(cls: Any, record: Any, json: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    key = ""
    value = None
    if not isinstance(record, Mapping):
        raise FieldError("a table")
    try:
        for name, key, read, optional in _fields(cls, json):
            if optional and key not in record:
                continue
            value = record.get(key)
            found[name] = read(value)
    except FieldError as error:
        raise FieldError(f"{key} is {value!r:.80}, but must be {error}") from None
    return found


@functools.cache
def _fields(cls: Any, json: bool) -> list[tuple[str, str, Read, bool | str]]:
    """Return name, key and reader of each field, and whether its key may be missing."""
    found = []
    for field in fields(cls):
        limits = None if json else field.metadata.get("limits", -math.inf)
        key = field.name if json else field.metadata.get("key", field.name.replace("_", "-"))
        if json or field.metadata.get("wire", True):
            optional = not json and field.metadata.get("optional", False)
            found.append((field.name, key, reader(field.type, limits, json), optional))
    return found


def reader(kind: Any, limits: Any = None, json: bool = False) -> Read:
    """Return the reader of a type; for JSON, whose null is nan, or of a record."""
    if is_dataclass(kind):
        return functools.partial(from_json, kind)
    if isinstance(kind, UnionType):  # an optional one
        some = reader(get_args(kind)[0], limits, json)
        return lambda value: None if value is None else some(value)
    if get_origin(kind) is Literal:
        limits = get_args(kind)
        kind = str
    elif elements := get_args(kind):
        each = reader(elements[0], limits, json)
        return functools.partial(_sequence, each, tuple if json else list)
    return functools.partial(_scalar, kind, limits, json)


def type_name(kind: Any) -> str:
    """Return the name of a type in messages, such as ``"an integer"``."""
    return _TYPE_NAMES.get(kind, "a value")


def _scalar(kind: Any, limits: Any, json: bool, value: Any) -> Any:
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**63 else math.inf
    elif kind is float and json and value is None:
        value = math.nan
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise FieldError(type_name(kind))
    if isinstance(limits, tuple):
        if value not in limits:
            raise FieldError(f"one of {', '.join(map(repr, limits))}")
    elif kind is int:  # one that fits on the wire
        least = -(2**63) if limits is None else max(limits, -(2**63))
        if not least <= value < 2**63:
            raise FieldError(f"an integer, at least {limits}")
    elif kind is float and limits is not None and not (limits <= value and math.isfinite(value)):
        raise FieldError(f"a finite number, at least {limits}")
    return value


def _sequence(each: Read, make: type, values: Any) -> Any:
    if not isinstance(values, list):
        raise FieldError("a list")
    return make(map(each, values))
