"""Models that travel as 16-bit changes, with the rounding errors carried forward.

A change is the difference to a model that both ends hold, so its few bits describe a small number.
What rounding took away is added to the next change (error feedback), so it is late and not lost.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord

from ...array_records import AnyArray, ArrayView, PrivateArray, record_of, view_record
from .frames import (
    Bytes,
    EncodedRecord,
    FrameError,
    Tensors,
    decode_arrays,
    encode_arrays,
    plain_arrays,
)

WireDtype = Literal["float32", "bfloat16", "float16"]


# --- arithmetic -------------------------------------------------------------------------------


def to_16_bits(values: npt.NDArray[np.float32], wire_dtype: str) -> npt.NDArray[np.uint16]:
    """Return 16-bit patterns of float32 values, rounded to the nearest, ties to even.

    Examples
    --------
    >>> [hex(b) for b in to_16_bits(np.float32([1.0, -2.5]), "bfloat16")]
    ['0x3f80', '0xc020']
    """
    if wire_dtype == "float16":
        with np.errstate(over="ignore"):  # too large becomes infinite, which the caller checks
            return values.astype(np.float16).view(np.uint16)
    patterns = np.ascontiguousarray(values).view(np.uint32)
    rounded = (patterns + 0x7FFF + ((patterns >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_16_bits(bits: npt.NDArray[np.uint16], wire_dtype: str) -> npt.NDArray[np.float32]:
    """Return the values of 16-bit patterns as float32."""
    if wire_dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded_change(
    new: Tensors, base: Tensors, carried: Tensors, wire_dtype: str
) -> tuple[Tensors, Tensors] | None:
    """Return the change from one model to another, and what rounding took away from it.

    Parameters
    ----------
    new, base : mapping of str to ndarray
        Models of the same layout.
    carried : mapping of str to ndarray
        The error of the change before; empty for none.
    wire_dtype : {"bfloat16", "float16"}
        What float32 changes are rounded to.

    Returns
    -------
    bits : mapping of str to ndarray
        Of each float32 tensor its change as 16-bit patterns (uint16); other tensors as they are.
    error : mapping of str to ndarray
        What rounding took away from each float32 tensor, float32.

    Instead None if a change is not finite in 16 bits: then the model must travel whole.
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
    return bits, error


def changed(base: Tensors, bits: Tensors, wire_dtype: str) -> Tensors:
    """Return the model that a change leads to; `base` stays as it is."""
    reached = dict(bits)
    for name, tensor in base.items():
        if tensor.dtype == np.float32:
            change = from_16_bits(np.atleast_1d(bits[name]), wire_dtype).reshape(tensor.shape)
            reached[name] = np.asarray(tensor + change)  # the sum of 0-d arrays is none
    return reached


def relative_error(error: Tensors, model: Tensors) -> float:
    """Return the root mean square of an error, relative to that of the model's tensors."""
    lost = sum(float(np.vdot(e, e)) for e in error.values())
    whole = sum(float(np.vdot(model[name], model[name])) for name in error)
    return float(np.sqrt(lost / whole)) if whole > 0 else 0.0


def layout_of(model: Tensors) -> Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and dtype of each tensor by name."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in model.items()}


# --- changes as records -----------------------------------------------------------------------


def _encode_change(bits: Tensors, **more: int) -> EncodedRecord:
    """Return a change, ready to be sent, with more keys in its description."""
    sent = encode_arrays(bits)
    return EncodedRecord({**sent.description, "kind": "change", **more}, sent.chunks)


def _decode_change(name: str, bits: Tensors, base: Tensors, wire_dtype: str) -> Tensors:
    """Return the model that a received change leads to from `base`, if it fits."""
    expected = {
        key: (shape, np.dtype(np.uint16) if dtype == np.float32 else dtype)
        for key, (shape, dtype) in layout_of(base).items()
    }
    if not base or layout_of(bits) != expected:
        raise FrameError(f"record {name!r} is a change to another model")
    return changed(base, bits, wire_dtype)


# --- the server's models on their way to the nodes ----------------------------------------------


@dataclass
class BroadcastRecord:
    """One version of a record for any number of nodes, in the form that each can read.

    Parameters
    ----------
    version : int
        What a node holds after it. It must hold the version before to read the change.
    change : EncodedRecord or None
        The change; None if there is none.
    tensors : mapping of str to ndarray
        The whole record; it is encoded only if a node needs it.
    """

    version: int
    change: EncodedRecord | None
    tensors: Tensors

    def for_holder_of(self, version: int | None) -> EncodedRecord:
        """Return the form for a node that holds this version, or none."""
        if self.change is not None and version == self.version - 1:
            return self.change
        return self._whole

    @functools.cached_property
    def _whole(self) -> EncodedRecord:
        sent = encode_arrays(self.tensors)
        return EncodedRecord({**sent.description, "version": self.version}, sent.chunks)


class Broadcast:
    """The versions of one record that all nodes get, such as the global model.

    All nodes hold the same model after a version, whether it came whole or as a change: the
    rounded one. The difference to the true one is part of the next change.

    Parameters
    ----------
    wire_dtype : {"bfloat16", "float16"}
        What changes are rounded to.

    Attributes
    ----------
    errors : list of float
        Of each version: how far the nodes' model is from the true one, relative root mean square.
    """

    def __init__(self, wire_dtype: str) -> None:
        self.errors: list[float] = []
        self._wire_dtype = wire_dtype
        self._held: Tensors = {}

    def next(self, record: ArrayRecord) -> BroadcastRecord:
        """Return the next version."""
        tensors = plain_arrays(record)
        version = len(self.errors) + 1
        change = encoded = None
        if layout_of(tensors) == layout_of(self._held):
            # The error so far is in the difference to what is held.
            change = rounded_change(tensors, self._held, {}, self._wire_dtype)
        if change is None:
            # A copy: the strategy may use the memory of its own model again.
            self._held = {name: tensor.copy() for name, tensor in tensors.items()}
            self.errors.append(0.0)
        else:
            bits, error = change
            self._held = changed(self._held, bits, self._wire_dtype)
            self.errors.append(relative_error(error, tensors))
            encoded = _encode_change(bits, version=version)
        return BroadcastRecord(version, encoded, self._held)


def decode_reply_change(
    name: str, description: Mapping[str, Any], part: Bytes, sent: ArrayRecord, wire_dtype: str
) -> ArrayRecord:
    """Return the record of a reply that came as a change.

    The change counts from the true model, `sent`, so the rounding error of what the node held is
    not lost in the average.

    Raises
    ------
    FrameError
        If it does not fit.
    """
    bits = decode_arrays(description.get("layout"), part)
    return view_record(_decode_change(name, bits, plain_arrays(sent), wire_dtype))


# --- the node's end -----------------------------------------------------------------------------


class HeldModels:
    """The models that a node holds in one session, by the name of their record.

    Parameters
    ----------
    wire_dtype : str
        What changes are rounded to; ``"float32"`` for no changes at all.
    views : bool
        Whether the app gets views on what is held, which it must not write to; else copies.
    """

    def __init__(self, wire_dtype: str, views: bool) -> None:
        self._wire_dtype = wire_dtype
        self._array_type = ArrayView if views else PrivateArray
        self._held: dict[str, tuple[int, Tensors]] = {}
        self._received: dict[str, dict[str, Tensors]] = {}
        self._current: dict[str, Tensors] = {}
        self._carried: dict[str, Tensors] = {}

    def begin(self, message_id: str) -> None:
        """Read the records of this message from now on; the reply to it counts from them.

        Others may come before it is answered, with newer models.
        """
        self._current = self._received[message_id] = {}

    def forget(self, message_id: str) -> None:
        """Keep the models of this message for no reply any more."""
        self._received.pop(message_id, None)

    def read(self, name: str, description: Mapping[str, Any], part: Bytes) -> ArrayRecord:
        """Return a record of arrays that was sent, and hold it if it has a version.

        Raises
        ------
        FrameError
            If it cannot be read, or is a change to something that is not held.
        """
        tensors: Tensors = decode_arrays(description.get("layout"), part)
        version = description.get("version")
        if description.get("kind") == "change":
            held, base = self._held.get(name, (0, {}))
            if not isinstance(version, int) or held != version - 1:
                raise FrameError(
                    f"record {name!r} changes to version {version}, but this node holds {held}"
                )
            tensors = _decode_change(name, tensors, base, self._wire_dtype)
        if self._wire_dtype != "float32":
            self._current[name] = tensors
            if isinstance(version, int):  # else it is of this node alone
                self._held[name] = version, tensors
        return record_of({key: self._array_type(tensor) for key, tensor in tensors.items()})

    def write(self, message_id: str, name: str, record: ArrayRecord) -> EncodedRecord:
        """Return a record of the reply to a message: a change, if it is of the layout that came."""
        tensors = plain_arrays(record)
        base = self._received.get(message_id, {}).get(name)
        if base is None or layout_of(tensors) != layout_of(base):
            return encode_arrays(tensors)
        carried = {
            key: error
            for key, error in self._carried.pop(name, {}).items()
            if key in base and error.shape == base[key].shape
        }
        change = rounded_change(tensors, base, carried, self._wire_dtype)
        if change is None:  # it diverged, and the server is to see that
            return encode_arrays(tensors)
        bits, self._carried[name] = change
        return _encode_change(bits)
