"""Whether a reply's model can be averaged with the others."""

from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord

from .algorithm.averaging import AnyArray
from .protocol import ProtocolError


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
            int(np.prod(shape)) * np.dtype(dtype).itemsize
            for shape, dtype in self._tensors.values()
        )

    def checked(self, arrays: ArrayRecord) -> dict[str, AnyArray]:
        """Return a model's tensors by name.

        Raises
        ------
        ProtocolError
            If a tensor is missing, extra, of another shape or dtype, or not finite; the message
            names the first.
        """
        differing = sorted(set(self._tensors) ^ set(arrays))
        if differing:
            missing = differing[0] in self._tensors
            raise ProtocolError(
                f"its model {'lacks' if missing else 'has an extra'} tensor {differing[0]!r}"
            )
        tensors = {}
        for name, expected in self._tensors.items():
            found = _shape_and_dtype(arrays[name])
            if found != expected:
                raise ProtocolError(
                    f"its tensor {name!r} is {_describe(found)}, not {_describe(expected)}"
                )
            tensors[name] = arrays[name].numpy()
        refuse_not_finite(tensors)
        return tensors


def refuse_not_finite(tensors: Mapping[str, AnyArray]) -> None:
    """Raise ProtocolError, naming the tensor, if one holds nan or infinity."""
    for name, tensor in tensors.items():
        if tensor.dtype.kind in "fc" and not np.isfinite(tensor).all():
            raise ProtocolError(
                f"its tensor {name!r} is not finite; a smaller learning rate may help"
            )


def _shape_and_dtype(array: Array) -> tuple[tuple[int, ...], str]:
    return tuple(array.shape), array.dtype


def _describe(tensor: tuple[tuple[int, ...], str]) -> str:
    return f"{tensor[1]} of shape {tensor[0]}"
