"""Models as 16-bit changes, with the rounding errors carried forward.

What travels is the change to a model that both ends know, so its few bits describe a small
number. What rounding took away is added to the next change (error feedback), so it is late and
not lost.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ...array_view import AnyArray

WireDtype = Literal["float32", "bfloat16", "float16"]

Tensors = Mapping[str, AnyArray]
Bits = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Change:
    """A change of a model, rounded.

    Parameters
    ----------
    bits : mapping of str to ndarray
        By tensor: 16-bit patterns (uint16) of float32 tensors' changes; tensors of other dtypes
        as they are.
    rounded : tuple of str
        The tensors that are 16-bit patterns.
    error : mapping of str to ndarray
        What rounding took away from each of them, float32.
    """

    bits: Tensors
    rounded: tuple[str, ...]
    error: Tensors


def to_16_bits(values: Floats, wire_dtype: str) -> Bits:
    """Return 16-bit patterns of float32 values, rounded to the nearest, ties to even.

    Examples
    --------
    >>> [hex(b) for b in to_16_bits(np.float32([1.0, -2.5]), "bfloat16")]
    ['0x3f80', '0xc020']
    """
    if wire_dtype == "float16":
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is seen
            return values.astype(np.float16).view(np.uint16)
    patterns = np.ascontiguousarray(values).view(np.uint32)
    rounded = (patterns + 0x7FFF + ((patterns >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_16_bits(bits: Bits, wire_dtype: str) -> Floats:
    """Return the values of 16-bit patterns as float32."""
    if wire_dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded_change(new: Tensors, base: Tensors, carried: Tensors, wire_dtype: str) -> Change | None:
    """Return the change from one model to another.

    Parameters
    ----------
    new, base : mapping of str to ndarray
        Models of the same names, shapes and dtypes.
    carried : mapping of str to ndarray
        The error of the change before; empty for none.
    wire_dtype : {"bfloat16", "float16"}
        What float32 changes are rounded to.

    Returns
    -------
    Change or None
        None if a change is not finite in 16 bits: then the model must travel whole.
    """
    bits: dict[str, AnyArray] = {}
    error: dict[str, AnyArray] = {}
    for name, tensor in new.items():
        if tensor.dtype != np.float32:
            bits[name] = tensor
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            change = tensor - base[name]
            if name in carried:
                change = change + carried[name]
        bits[name] = to_16_bits(np.atleast_1d(change), wire_dtype).reshape(tensor.shape)
        back = from_16_bits(np.atleast_1d(bits[name]), wire_dtype).reshape(tensor.shape)
        if not np.isfinite(back).all():
            return None
        error[name] = change - back
    return Change(bits, tuple(error), error)


def changed(base: Tensors, bits: Tensors, rounded: Collection[str], wire_dtype: str) -> Tensors:
    """Return the model that a change leads to; `base` stays as it is."""
    return {
        name: _added(base[name], tensor, wire_dtype) if name in rounded else tensor
        for name, tensor in bits.items()
    }


def _added(base: AnyArray, bits: AnyArray, wire_dtype: str) -> AnyArray:
    change = from_16_bits(np.atleast_1d(bits), wire_dtype).reshape(base.shape)
    return np.asarray(base + change)  # the sum of arrays without dimensions is none


def relative_error(error: Tensors, model: Tensors) -> float:
    """Return the root mean square of an error, relative to that of the model's tensors."""
    lost = sum(float(np.vdot(e, e)) for e in error.values())
    whole = sum(float(np.vdot(model[name], model[name])) for name in error)
    return float(np.sqrt(lost / whole)) if whole > 0 else 0.0


def same_layout(one: Tensors, other: Tensors) -> bool:
    """Whether two models have the same names, shapes and dtypes."""
    return one.keys() == other.keys() and all(
        tensor.shape == other[name].shape and tensor.dtype == other[name].dtype
        for name, tensor in one.items()
    )
