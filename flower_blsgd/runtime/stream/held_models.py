"""What a node holds of the models that it was sent, so that changes can be read and made."""

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord

from ...array_view import ArrayView, PrivateArray, record_of, view_record
from .broadcast import tensors_of
from .frames import Bytes, FrameError
from .records import EncodedRecord, decode_arrays, encode_arrays
from .wire_dtype import Tensors, changed, relative_error, rounded_change, same_layout


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
        self._carried: dict[str, Tensors] = {}

    def read(self, name: str, description: Mapping[str, Any], part: Bytes) -> ArrayRecord:
        """Return a record of arrays that was sent, and hold it if it has a version.

        Raises
        ------
        FrameError
            If it cannot be read, or is a change to something that is not held.
        """
        record = decode_arrays(description.get("layout"), part, self._views)
        version = description.get("version")
        if not isinstance(version, int):
            return record
        tensors = tensors_of(record)
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
            if tensors.keys() != base.keys():
                raise FrameError(f"record {name!r} is a change to other tensors")
            tensors = changed(base, tensors, rounded, self._wire_dtype)
        self._held[name] = version, tensors
        kind = ArrayView if self._views else PrivateArray
        return record_of({key: kind(tensor) for key, tensor in tensors.items()})

    def write(self, name: str, record: ArrayRecord) -> EncodedRecord:
        """Return a record of a reply: a change, if it is of the layout of what is held."""
        version, held = self._held.get(name, (0, {}))
        tensors = tensors_of(record) if version else None
        if tensors is None or not same_layout(tensors, held):
            return encode_arrays(record)
        carried = self._carried.get(name, {})
        change = rounded_change(tensors, held, carried, self._wire_dtype)
        if change is None:  # it diverged, and the server is to see that
            self._carried.pop(name, None)
            return encode_arrays(record)
        self._carried[name] = change.error
        sent = encode_arrays(view_record(change.bits))
        return EncodedRecord(
            {
                **sent.description,
                "kind": "change",
                "rounded": list(change.rounded),
                "base": version,
                "error": relative_error(change.error, tensors),
            },
            sent.pieces,
        )


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
    fits = (
        base is not None
        and bits is not None
        and isinstance(rounded, list)
        and bits.keys() == base.keys()
        and all(bits[key].shape == base[key].shape for key in bits)
    )
    if not fits:
        raise FrameError(f"record {name!r} is a change to another model")
    assert base is not None
    assert bits is not None
    assert rounded is not None
    return view_record(changed(base, bits, rounded, wire_dtype))
