"""Move a model's weights to and from Flower records."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from ..array_records import Layout, flat_like, flat_of, flat_record


def load_state(model: nn.Module, arrays: ArrayRecord) -> None:
    """Overwrite every tensor of the model's state dict.

    Raises
    ------
    ValueError
        If names or shapes differ: the message names the first that does.
    """
    own = model.state_dict()
    differing = sorted(set(own) ^ set(arrays))
    if differing:
        raise ValueError(
            f"the global model and this worker's model differ: tensor {differing[0]!r} is only "
            f"in {'the worker' if differing[0] in own else 'the global model'}"
        )
    sources = []
    for name, tensor in own.items():
        array = arrays[name]
        if tuple(array.shape) != tuple(tensor.shape):
            raise ValueError(
                f"tensor {name!r} has shape {tuple(array.shape)} in the global model and "
                f"{tuple(tensor.shape)} in this worker's"
            )
        sources.append(tensor_on(array.numpy()))
    if own:
        with torch.no_grad():
            torch._foreach_copy_(list(own.values()), sources)


def state_record(model: nn.Module, like: ArrayRecord | None = None) -> ArrayRecord:
    """Return a copy of every tensor of the model's state dict, in one buffer.

    With `like` it is memory of the kind that this record lies in, see `flat_like`.
    """
    own = model.state_dict()
    layout = layout_of(own)
    record = flat_record(layout) if like is None else flat_like(like, layout)
    if own:
        with torch.no_grad():
            targets = [torch.from_numpy(array.numpy()) for array in record.values()]
            torch._foreach_copy_(targets, list(own.values()))
    return record


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a record that holds these tensors."""
    return Layout.of(
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


def model_fingerprint(model: nn.Module) -> str:
    """Return a text that is equal for models whose tensors have the same names, shapes, dtypes."""
    layout = [(n, tuple(t.shape), str(t.dtype)) for n, t in sorted(model.state_dict().items())]
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:16]


class ModelTransfer:
    """Moves all tensors of a worker's model at once, out of an order and into its reply.

    On the local grid an order's model lies in shared memory, in one buffer, and so does the
    reply's: the model is read there, and written there. To and from an accelerator it is one copy;
    on the device one kernel cuts it into tensors.

    Parameters
    ----------
    model : torch.nn.Module
        On its device.
    device : torch.device
        That device.
    staged : bool, optional
        Whether a copy in one buffer is kept on the device; by default on all but CPUs.
    """

    def __init__(self, model: nn.Module, device: torch.device, staged: bool | None = None) -> None:
        self._model, self._device = model, device
        self._staged = device.type != "cpu" if staged is None else staged
        self._layout: Layout | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._parts: Sequence[Tensor] = ()

    def load(self, arrays: ArrayRecord) -> None:
        """Overwrite every tensor of the model's state dict; see `load_state` for what raises."""
        own = self._model.state_dict()
        flat = flat_of(arrays)
        if not self._staged or flat is None or flat.layout != layout_of(own):
            load_state(self._model, arrays)
            return
        self._stage(flat.layout)
        # It returns when the order's memory, which is not page-locked, may be written to again.
        self._buffer.copy_(tensor_on(flat.bytes))
        with torch.no_grad():
            torch._foreach_copy_(list(own.values()), list(self._parts))

    def record(self, like: ArrayRecord) -> ArrayRecord:
        """Return a copy of every tensor of the model's state dict.

        Parameters
        ----------
        like : ArrayRecord
            The order's model: the copy is in memory of that kind.
        """
        if not self._staged:
            return state_record(self._model, like)
        own = self._model.state_dict()
        record = flat_like(like, layout_of(own))
        flat = flat_of(record)
        assert flat is not None
        self._stage(flat.layout)
        with torch.no_grad():
            torch._foreach_copy_(list(self._parts), list(own.values()))
            torch.from_numpy(flat.bytes).copy_(self._buffer)
        return record

    def _stage(self, layout: Layout) -> None:
        """Have room for a model of this layout on the device, in one buffer."""
        if layout == self._layout:
            return
        self._layout = layout
        self._buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self._device)
        self._parts = [
            self._buffer[offset : offset + dtype.itemsize * math.prod(shape)]
            .view(getattr(torch, name))
            .view(shape)
            for _, name, dtype, shape, offset in layout.places
        ]


def tensor_on(array: npt.NDArray[Any]) -> Tensor:
    """Return a tensor on an array's memory; a copy where that may not be written to.

    torch warns of such arrays, and views on shared memory may be such.
    """
    return torch.from_numpy(np.require(array, requirements="W"))
