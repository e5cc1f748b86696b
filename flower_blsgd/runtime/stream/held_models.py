"""What a node holds of the models that it was sent, so that changes can be read and made."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from ...array_view import ArrayView, PrivateArray, record_of, view_record
from .broadcast import encode_change, tensors_of
from .frames import Bytes, FrameError
from .records import EncodedRecord, decode_arrays, encode_arrays
from .wire_dtype import Tensors, changed, rounded_change, same_layout


class HeldModels:
    """The models of one session, by the name of their record.

    Parameters
    ----------
    wire_dtype : str
        What changes are rounded to; ``"float32"`` for no changes at all.
    views : bool
        Whether the app gets views on what is held, which it must not write to; else copies.
    """

    def __init__(self, wire_dtype: str, views: bool) -> None:
        self._wire_dtype = wire_dtype
        self._views = views
        self._held: dict[str, tuple[int, Tensors]] = {}
        self._sent: dict[str, dict[str, Tensors]] = {}
        self._begun: dict[str, Tensors] = {}
        self._carried: dict[str, Tensors] = {}

    def begin(self, message_id: str) -> None:
        """Read the records of this message from now on; the reply to it counts from them.

        Others may come before it is answered, with newer models.
        """
        self._begun = self._sent[message_id] = {}

    def forget(self, message_id: str) -> None:
        """Hold the models of this message for no reply any more."""
        self._sent.pop(message_id, None)

    def read(self, name: str, description: Mapping[str, Any], part: Bytes) -> ArrayRecord:
        """Return a record of arrays that was sent, and hold it if it has a version.

        Raises
        ------
        FrameError
            If it cannot be read, or is a change to something that is not held.
        """
        record = decode_arrays(description.get("layout"), part, self._views)
        version = description.get("version")
        tensors = tensors_of(record) if self._wire_dtype != "float32" else None
        if not isinstance(version, int):
            if tensors is not None:  # it is this node's own
                self._begun[name] = tensors
            return record
        if tensors is None:
            raise FrameError(f"record {name!r} has a version and no plain arrays")
        if description.get("kind") == "change":
            base_version, base = self._held.get(name, (0, {}))
            rounded = description.get("rounded")
            if base_version != description.get("base") or not isinstance(rounded, list):
                raise FrameError(
                    f"record {name!r} is a change to version {description.get('base')}, but this "
                    f"node holds {base_version}"
                )
            if not _fits(tensors, base, rounded):
                raise FrameError(f"record {name!r} is a change to other tensors")
            tensors = changed(base, tensors, rounded, self._wire_dtype)
        self._held[name] = version, tensors
        self._begun[name] = tensors
        kind = ArrayView if self._views else PrivateArray
        return record_of({key: kind(tensor) for key, tensor in tensors.items()})

    def write(self, message_id: str, name: str, record: ArrayRecord) -> EncodedRecord:
        """Return a record of the reply to a message: a change, if it is of the layout that came."""
        sent_to_us = self._sent.get(message_id, {}).get(name)
        tensors = tensors_of(record) if sent_to_us is not None else None
        if sent_to_us is None or tensors is None or not same_layout(tensors, sent_to_us):
            return encode_arrays(record)
        carried = self._carried.get(name, {})
        if not same_layout(carried, _rounded_ones(sent_to_us)):
            carried = {}
        change = rounded_change(tensors, sent_to_us, carried, self._wire_dtype)
        if change is None:  # it diverged, and the server is to see that
            self._carried.pop(name, None)
            return encode_arrays(record)
        self._carried[name] = change.error
        return encode_change(change)


def reply_record(
    name: str, description: Mapping[str, Any], part: Bytes, sent: ArrayRecord, wire_dtype: str
) -> ArrayRecord:
    """Return the record of a reply that came as a change.

    Parameters
    ----------
    name, description, part
        The record's, as it came.
    sent : ArrayRecord
        The true model that the node was sent: the change counts from there, so the rounding
        error of what the node held is not lost in the average.
    wire_dtype : str
        Of the change.

    Raises
    ------
    FrameError
        If it does not fit.
    """
    base = tensors_of(sent)
    bits = tensors_of(decode_arrays(description.get("layout"), part, views=True))
    rounded = description.get("rounded")
    if base is None or bits is None or not isinstance(rounded, list):
        raise FrameError(f"record {name!r} is a change to nothing")
    if not _fits(bits, base, rounded):
        raise FrameError(f"record {name!r} is a change to another model")
    return view_record(changed(base, bits, rounded, wire_dtype))


def _fits(bits: Tensors, base: Tensors, rounded: list[Any]) -> bool:
    """Whether a change is one to this model."""
    return bits.keys() == base.keys() and all(
        bits[name].shape == tensor.shape
        and bits[name].dtype == (np.uint16 if name in rounded else tensor.dtype)
        for name, tensor in base.items()
    )


def _rounded_ones(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if tensor.dtype == np.float32}
