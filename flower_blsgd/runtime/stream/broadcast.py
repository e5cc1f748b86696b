"""A model for all nodes: as a 16-bit change to those that hold the one before, else whole."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import ArrayRecord

from ...array_view import view_record
from ..array_memory import memory_of
from .records import EncodedRecord, encode_arrays
from .wire_dtype import Change, Tensors, changed, relative_error, rounded_change, same_layout

_versions = itertools.count(1)
"""Of all broadcasts: a version of one never passes for one of another."""


@dataclass(frozen=True)
class BroadcastRecord:
    """A record for any number of nodes, in the form that each can read.

    Parameters
    ----------
    version : int
        What a node holds after it.
    base : int
        What a node must hold to read the change.
    change : EncodedRecord or None
        The change; None if there is none.
    whole : callable
        Returns the whole record; it is encoded only if somebody needs it.
    """

    version: int
    base: int
    change: EncodedRecord | None
    whole: Callable[[], EncodedRecord]

    def for_holder_of(self, version: int | None) -> EncodedRecord:
        """Return the form for a node that holds this version, or none."""
        if self.change is not None and version == self.base:
            return self.change
        return self.whole()


class Broadcast:
    """The versions of one record, such as the global model.

    All nodes hold the same model after a version, however they got it: the rounded one. The
    difference to the true one is part of the next change.

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
        self._version = 0
        self._held: Tensors = {}

    def next(self, record: ArrayRecord) -> BroadcastRecord | None:
        """Return the next version; None if its arrays are not all plain numbers."""
        tensors = tensors_of(record)
        if tensors is None:
            return None
        base, self._version = self._version, next(_versions)
        change = None
        if same_layout(tensors, self._held):
            # The error so far is in the difference to what is held.
            change = rounded_change(tensors, self._held, {}, self._wire_dtype)
        encoded = None
        if change is None:
            # A copy: the strategy may use the memory of its own model again.
            self._held = {name: tensor.copy() for name, tensor in tensors.items()}
            self.errors.append(0.0)
        else:
            self._held = changed(self._held, change.bits, change.rounded, self._wire_dtype)
            self.errors.append(relative_error(change.error, tensors))
            encoded = encode_change(change, base=base, version=self._version)
        whole = functools.cache(functools.partial(_whole, self._held, self._version))
        return BroadcastRecord(self._version, base, encoded, whole)


def tensors_of(record: ArrayRecord) -> Tensors | None:
    """Return a record's arrays by name, without a copy; None if one is not of plain numbers."""
    tensors = {name: memory_of(array) for name, array in record.items()}
    if any(tensor is None for tensor in tensors.values()):
        return None
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def encode_change(change: Change, **more: int) -> EncodedRecord:
    """Return a change, ready to be sent, with more that its description says."""
    sent = encode_arrays(view_record(change.bits))
    kind = {"kind": "change", "rounded": list(change.rounded)}
    return EncodedRecord({**sent.description, **kind, **more}, sent.pieces)


def _whole(held: Tensors, version: int) -> EncodedRecord:
    sent = encode_arrays(view_record(held))
    return EncodedRecord({**sent.description, "version": version}, sent.pieces)
