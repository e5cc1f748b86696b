"""Between dataclasses and Flower's flat records."""

import functools
from dataclasses import fields
from typing import Any, cast

import numpy as np
import numpy.typing as npt


class ProtocolError(ValueError):
    """A message that does not hold what the protocol promises."""


@functools.cache
def _wire_names(cls: Any) -> dict[str, tuple[str, type]]:
    return {
        f.name: (f.name.replace("_", "-"), cast(type, f.type))
        for f in fields(cls)
        if f.metadata.get("wire", True)
    }


def to_wire(values: Any) -> dict[str, Any]:
    """Return a dataclass's wire fields with keys in kebab-case."""
    return {key: getattr(values, name) for name, (key, _) in _wire_names(values.__class__).items()}


def from_wire(cls: Any, record: Any) -> dict[str, Any]:
    """Read a dataclass's wire fields from a record.

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
    """Read the bytes of an array; ProtocolError if they are not such."""
    if not isinstance(raw, bytes) or len(raw) % dtype.itemsize:
        raise ProtocolError(f"the message's {what} are not {dtype.name} bytes")
    return np.frombuffer(raw, dtype)
