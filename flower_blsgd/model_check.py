"""Whether a reply's model can be averaged with the others."""

import math
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from .algorithm.averaging import AnyArray
from .wire import ProtocolError


class ModelShape:
    """Names, shapes and dtypes of a model's tensors.

    Parameters
    ----------
    arrays : ArrayRecord
        The global model.
    """

    def __init__(self, arrays: ArrayRecord) -> None:
        self._tensors = {name: _shape_and_dtype(array) for name, array in arrays.items()}

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
        missing = sorted(set(self._tensors) - set(arrays))
        if missing:
            raise ProtocolError(f"its model lacks tensor {missing[0]!r}")
        return self.checked_part(arrays)

    def checked_part(self, arrays: ArrayRecord) -> dict[str, AnyArray]:
        """Return the tensors of a record that may leave some out, such as momentum.

        Raises
        ------
        ProtocolError
            As `checked` does.
        """
        extra = sorted(set(arrays) - set(self._tensors))
        if extra:
            raise ProtocolError(f"its model has an extra tensor {extra[0]!r}")
        tensors = {}
        for name, expected in self._tensors.items():
            if name not in arrays:
                continue
            array = arrays[name]
            tensor = array.numpy()
            # What the array holds counts, not what it says that it holds.
            for found in (_shape_and_dtype(array), (tensor.shape, tensor.dtype)):
                if found != expected:
                    raise ProtocolError(
                        f"its tensor {name!r} is {_describe(found)}, not {_describe(expected)}"
                    )
            if tensor.dtype.kind in "fc" and not np.isfinite(tensor).all():
                raise ProtocolError(
                    f"its tensor {name!r} is not finite; a smaller learning rate may help"
                )
            tensors[name] = tensor
        return tensors


def _shape_and_dtype(array: Array) -> tuple[tuple[int, ...], np.dtype[Any] | str]:
    try:
        return tuple(array.shape), np.dtype(array.dtype)
    except TypeError:  # a name that numpy does not know
        return tuple(array.shape), array.dtype


def _describe(tensor: tuple[tuple[int, ...], np.dtype[Any] | str]) -> str:
    return f"{tensor[1]} of shape {tensor[0]}"
