"""Whether a reply's model, and its optimizer's state, can be averaged with the others."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from .algorithm.averaging import AnyArray
from .algorithm.finite import first_not_finite
from .flat_record import FlatTensors, flat_of
from .protocol import COUNTERS, SLOTS, state_name
from .wire import ProtocolError

_Kind = tuple[tuple[int, ...], np.dtype[Any] | str]
"""Shape and dtype."""

_COUNTER: _Kind = ((), np.dtype(np.float32))


class ModelShape:
    """Names, shapes and dtypes of a model's tensors.

    Parameters
    ----------
    arrays : ArrayRecord
        The global model.
    """

    def __init__(self, arrays: ArrayRecord) -> None:
        self._tensors = {name: _shape_and_dtype(array) for name, array in arrays.items()}
        flat = flat_of(arrays)
        self._layout = flat.layout if flat else None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(
            math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self._tensors.values()
        )

    def checked(self, arrays: ArrayRecord) -> dict[str, AnyArray]:
        """Return a model's tensors by name.

        Raises
        ------
        ProtocolError
            If a tensor is missing, extra, of another shape or dtype, or not finite; the message
            names the first.
        """
        flat = flat_of(arrays)
        if flat is not None and flat.layout == self._layout and not first_not_finite(flat.runs()):
            return FlatTensors(arrays, flat)
        missing = sorted(set(self._tensors) - set(arrays))
        if missing:
            raise ProtocolError(f"its model lacks tensor {missing[0]!r}")
        return _checked(arrays, self._tensors, "its model")

    def checked_momentum(self, arrays: ArrayRecord) -> dict[str, AnyArray]:
        """Return the tensors that an optimizer keeps, by `state_name`.

        It may know nothing of a parameter, such as a frozen one.

        Raises
        ------
        ProtocolError
            If it knows only a part of what belongs together, or a tensor is extra, of another
            shape or dtype, or not finite; the message names the first.
        """
        for name in self._tensors:
            for slots in SLOTS.values():
                keys = [state_name(slot, name) for slot in slots]
                missing = [key for key in keys if key not in arrays]
                if 0 < len(missing) < len(keys):
                    raise ProtocolError(f"its optimizer's state lacks tensor {missing[0]!r}")
        return _checked(arrays, self._kept, "its optimizer's state")

    @functools.cached_property
    def _kept(self) -> dict[str, _Kind]:
        """All that any optimizer may keep."""
        return {
            state_name(slot, name): _COUNTER if slot in COUNTERS else kind
            for slots in SLOTS.values()
            for slot in slots
            for name, kind in self._tensors.items()
        }


def _checked(arrays: ArrayRecord, expected: Mapping[str, _Kind], what: str) -> dict[str, AnyArray]:
    """Return the tensors in the order of those that are expected; some may be missing."""
    held = dict(arrays.items())
    extra = sorted(set(held) - set(expected))
    if extra:
        raise ProtocolError(f"{what} has an extra tensor {extra[0]!r}")
    tensors = {}
    for name, kind in expected.items():
        array = held.get(name)
        if array is None:
            continue
        tensor = array.numpy()
        # What the array holds counts, not what it says that it holds.
        for found in (_shape_and_dtype(array), (tensor.shape, tensor.dtype)):
            if found != kind:
                raise ProtocolError(
                    f"its tensor {name!r} is {_describe(found)}, not {_describe(kind)}"
                )
        tensors[name] = tensor
    wrong = first_not_finite(tensors)
    if wrong is not None:
        raise ProtocolError(f"its tensor {wrong!r} is not finite; a smaller learning rate may help")
    return tensors


def _shape_and_dtype(array: Array) -> _Kind:
    return tuple(array.shape), _dtype(array.dtype)


@functools.lru_cache(maxsize=64)
def _dtype(name: str) -> np.dtype[Any] | str:
    try:
        return np.dtype(name)
    except TypeError:  # a name that numpy does not know
        return name


def _describe(tensor: _Kind) -> str:
    return f"{tensor[1]} of shape {tensor[0]}"
