"""Take a worker's model from an order, and into a reply, with as few copies as can be."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from ..flat_record import Layout, flat_like, flat_of
from ..runtime.pinned_memory import pin
from .model_state import layout_of, load_state, state_record


class ModelTransfer:
    """Moves all tensors of a model at once.

    On the local grid an order's model lies in shared memory, in one piece, and so does the reply's:
    the model is read there, and written there. To and from an accelerator it is one copy, in
    memory that CUDA knows; on the device it is cut into tensors by one kernel.

    Parameters
    ----------
    model : torch.nn.Module
        On its device.
    device : torch.device
        That device.
    staged : bool, optional
        Whether a copy in one piece is kept on the device; by default on all but CPUs.
    """

    def __init__(self, model: nn.Module, device: torch.device, staged: bool | None = None) -> None:
        self._model, self._device = model, device
        self._staged = device.type != "cpu" if staged is None else staged
        self._layout: Layout | None = None
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._parts: Sequence[Tensor] = ()

    def load(self, arrays: ArrayRecord) -> None:
        """Overwrite every tensor of the model's state dict.

        Raises
        ------
        ValueError
            If names or shapes differ: the message names the first that does.
        """
        own = self._model.state_dict()
        flat = flat_of(arrays)
        if not self._staged or flat is None or flat.layout != layout_of(own):
            load_state(self._model, arrays)
            return
        self._stage(flat.layout)
        pinned = self._device.type == "cuda" and pin(flat.memory)
        # torch warns of arrays that it may not write to.
        memory = torch.from_numpy(np.require(flat.bytes, requirements="W"))
        self._piece.copy_(memory, non_blocking=pinned)
        with torch.no_grad():
            torch._foreach_copy_(list(own.values()), list(self._parts))
        if pinned:  # the order's memory may be written to as soon as we return
            torch.cuda.current_stream(self._device).synchronize()

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
        pinned = self._device.type == "cuda" and pin(flat.memory)
        with torch.no_grad():
            torch._foreach_copy_(list(self._parts), list(own.values()))
            torch.from_numpy(flat.bytes).copy_(self._piece, non_blocking=pinned)
        if pinned:
            torch.cuda.current_stream(self._device).synchronize()
        return record

    def _stage(self, layout: Layout) -> None:
        """Have room for a model of this layout on the device, in one piece."""
        if layout == self._layout:
            return
        self._layout = layout
        self._piece = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self._device)
        self._parts = [
            self._piece[offset : offset + dtype.itemsize * math.prod(shape)]
            .view(getattr(torch, name))
            .view(shape)
            for _, name, dtype, shape, offset in layout.places
        ]
