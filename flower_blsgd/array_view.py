"""Flower arrays that keep their memory instead of serialised bytes."""

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

AnyArray = npt.NDArray[Any]

_NUMPY = "numpy.ndarray"  # Flower's name of the form that its arrays are serialised in


class ArrayView(Array):
    """An array of a record whose memory is somebody's ndarray, without a copy.

    Flower's own Array holds serialised bytes: two copies to make one, two to read it. This one
    makes the bytes only where they are needed, on a wire, and then they are the same bytes.
    `numpy` returns the memory itself, so whoever writes to it changes the array.

    Pickled or copied it becomes a plain Array.

    Parameters
    ----------
    ndarray : numpy.ndarray
        Must not change while the record is in use.
    dtype : str, optional
        The name of its dtype, where it is known already: asking numpy takes longer than all else.
    """

    def __init__(self, ndarray: AnyArray, dtype: str = "") -> None:
        # Not through __setattr__, which keeps the books on serialised bytes.
        self.__dict__.update(
            dtype=dtype or str(ndarray.dtype), shape=ndarray.shape, stype=_NUMPY, _memory=ndarray
        )

    def numpy(self) -> AnyArray:
        """Return the memory."""
        memory: AnyArray = self.__dict__["_memory"]
        return memory

    @property
    def memory(self) -> AnyArray:
        """Where it is, also where `numpy` returns a copy."""
        memory: AnyArray = self.__dict__["_memory"]
        return memory

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The serialised bytes, made anew."""
        buffer = BytesIO()
        np.save(buffer, self.memory, allow_pickle=False)
        return buffer.getvalue()

    @property
    def is_dirty(self) -> bool:
        """Always: nobody tells when the memory changes."""
        return True

    @is_dirty.setter
    def is_dirty(self, value: bool) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        same_kind = (self.dtype, self.shape, self.stype) == (
            other.dtype,
            tuple(other.shape),
            other.stype,
        )
        return same_kind and self.data == other.data

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


class PrivateArray(ArrayView):
    """An array that behaves as Flower's own: every `numpy` is a copy."""

    def numpy(self) -> AnyArray:
        """Return a copy of the memory."""
        return self.memory.copy()


# The type that Flower writes on the wire is the class's name.
ArrayView.__qualname__ = PrivateArray.__qualname__ = Array.__qualname__


def view_record(tensors: Mapping[str, AnyArray]) -> ArrayRecord:
    """Return a record of views. ``ArrayRecord({...})`` would make plain arrays of them."""
    return record_of({name: ArrayView(tensor) for name, tensor in tensors.items()})


def record_of(arrays: dict[str, Array]) -> ArrayRecord:
    """Return a record of these very arrays.

    Past Flower's check of each name and type, which takes most of the time that a message takes.
    """
    record = ArrayRecord()
    record.__dict__["_data"].update(arrays)
    return record
