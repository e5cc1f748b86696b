"""Send what a script or notebook defines to our own worker processes, by value.

A worker process does not import the user's ``__main__``, so functions and classes from there
travel whole (cloudpickle). Large tensors and arrays travel as shared memory, once for all
processes, and copy-on-write: a worker that changes them changes its own copy only.
"""

import io
import sys
from typing import Any

import cloudpickle
import numpy as np

from .array_memory import is_plain
from .shared_arrays import Parcel, SharedTensor
from .shared_block import AnyArray
from .shared_pool import Placement, Pool

_INLINE_BYTES = 1 << 16


def ship(content: object, pool: Pool) -> Parcel:
    """Return an object, ready to be sent to a worker process.

    Raises
    ------
    UsageError
        If there is not enough memory for its tensors.
    Exception
        Whatever cloudpickle raises of something that cannot travel, such as an open file.
    """
    buffer = io.BytesIO()
    pickler = _Shipper(buffer, pool)
    pickler.dump(content)
    return Parcel(buffer.getvalue(), pickler.placements)


class _Shipper(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, buffer: io.BytesIO, pool: Pool) -> None:
        super().__init__(buffer)
        self.placements: list[Placement] = []
        self._pool = pool
        self._placed: dict[tuple[object, ...], tuple[SharedTensor, AnyArray]] = {}

    def persistent_id(self, content: Any) -> Any:
        """Name the place of a large tensor or array; None pickles everything else as it is."""
        if type(content) in (np.ndarray, np.memmap):
            return self._place(content, is_torch=False)
        memory = _memory_of_tensor(content)
        return None if memory is None else self._place(memory, is_torch=True)

    def _place(self, array: AnyArray, is_torch: bool) -> SharedTensor | None:
        if array.nbytes < _INLINE_BYTES or not is_plain(array):
            return None
        address = array.__array_interface__["data"][0]
        key = (address, array.dtype.str, array.shape, array.strides, is_torch)
        if key not in self._placed:
            contiguous = np.ascontiguousarray(array)
            placement = self._pool.place([contiguous])
            self.placements.append(placement)
            place = SharedTensor(
                placement.block.number, placement.offsets[0], array.dtype.str, array.shape, is_torch
            )
            self._placed[key] = place, array  # kept, so that no other gets its address
        return self._placed[key][0]


def _memory_of_tensor(content: Any) -> AnyArray | None:
    """Return a plain CPU tensor's elements; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None or type(content) is not torch.Tensor or content.requires_grad:
        return None
    if content.device.type != "cpu" or content.layout is not torch.strided:
        return None
    try:
        memory: AnyArray = content.numpy()
    except (TypeError, RuntimeError):  # numpy does not know bfloat16, conjugate views and others
        return None
    return memory
