"""The data sets that a worker reads, where they lie, and the batch of a step from them."""

import contextlib
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from ..errors import UsageError

_LOG = logging.getLogger(__name__)

DATA_SHARE = 0.5
"""Of an accelerator's free memory; the rest is for models, their steps, and other workers."""

Samples = Any
"""A pair (inputs, targets) of tensors, arrays or memory maps; a TensorDataset; any map-style
Dataset of pairs; or a `Subset` of one of these, of which nothing is copied."""


def num_samples(samples: Samples) -> int:
    """Return how many samples a data set has."""
    tensors = tensor_parts(samples)
    return len(samples) if tensors is None else len(tensors[0])


def tensor_parts(samples: Samples) -> Sequence[Tensor] | None:
    """Return the tensors that a data set consists of; None if it is of another kind.

    Arrays become tensors that share their memory.

    UsageError if torch cannot read the memory of an array.
    """
    if isinstance(samples, TensorDataset):
        return samples.tensors
    kinds = Tensor | np.ndarray
    if isinstance(samples, tuple | list) and all(isinstance(part, kinds) for part in samples):
        return [part if isinstance(part, Tensor) else _on_array(part) for part in samples]
    return None


def _on_array(array: np.ndarray[Any, Any]) -> Tensor:
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        raise UsageError(
            f"data: an array with dtype = {array.dtype.str!r} and strides = {array.strides} cannot "
            "be a tensor; copy it with np.ascontiguousarray(x, x.dtype.newbyteorder('='))"
        )
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of one that is read-only
        return torch.from_numpy(array)


class BatchSource:
    """Gathers a batch of samples by their indices, and brings it to a worker's device.

    Tensors move to an accelerator once and as a whole, so that a batch is one gather there. What
    would take more than half of its free memory stays on the host, and one line in the log says
    so. Then, and for other data sets, the host makes every batch; to CUDA it goes through
    page-locked memory, so that the host gathers the next one while the device computes.

    Parameters
    ----------
    samples : Samples
        The data set.
    device : torch.device
        The worker's.
    move : bool (default: True)
        Whether tensors may move to the device as a whole. On a CPU nothing ever does: a memory
        map stays one.

    Attributes
    ----------
    on_device : bool
        Whether the samples are on the device, so that the host has no part in a batch.

    Raises
    ------
    ValueError
        If the data set is a sequence of tensors, but no pair of the same length.
    """

    def __init__(self, samples: Samples, device: torch.device, move: bool = True) -> None:
        self._device = device
        self._chosen: Tensor | None = None
        if type(samples) is Subset:  # not one of the user's own, that may change samples
            self._chosen = torch.as_tensor(samples.indices)
            samples = samples.dataset
        self._dataset = samples
        self._parts = tensor_parts(samples)
        if self._parts is not None:
            if len(self._parts) != 2:
                raise ValueError(
                    f"expected a pair (inputs, targets), got {len(self._parts)} tensors"
                )
            if len(self._parts[0]) != len(self._parts[1]):
                raise ValueError(f"{len(self._parts[0])} inputs, but {len(self._parts[1])} targets")
            if move:
                self._parts = _moved(self._parts, device)
        self.on_device = self._parts is not None and not _elsewhere(self._parts, device)
        if self._chosen is not None and self.on_device:
            self._chosen = self._chosen.to(device)

    def __len__(self) -> int:
        if self._chosen is not None:
            return len(self._chosen)
        return len(self._dataset) if self._parts is None else len(self._parts[0])

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of the samples, on the worker's device.

        The indices may lie anywhere. Nobody waits for a copy of them if they are on the device
        where `on_device` holds, else on the host.
        """
        if self._chosen is not None:
            indices = self._chosen[indices.to(self._chosen.device)]
        if self._parts is None:
            inputs, targets = _pair(default_collate([self._dataset[i] for i in indices.tolist()]))
        else:
            inputs, targets = (part[indices.to(part.device)] for part in self._parts)
        return self._brought(inputs), self._brought(targets)

    def _brought(self, part: Any) -> Any:
        if self._device.type == "cuda" and isinstance(part, Tensor) and part.device.type == "cpu":
            return part.pin_memory().to(self._device, non_blocking=True)
        return part.to(self._device)


def _pair(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and targets of a collated batch; ValueError if it is no pair of such."""
    parts = batch if isinstance(batch, tuple | list) else [batch]
    if len(parts) != 2 or not all(hasattr(part, "to") for part in parts):
        raise ValueError(
            "a sample of a Dataset must be a pair (inputs, targets) of tensors, arrays or numbers; "
            f"found {', '.join(type(part).__name__ for part in parts)}"
        )
    return parts[0], parts[1]


def _moved(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Copy the tensors to the device; return them unchanged if its memory is too small."""
    num_bytes = sum(part.nbytes for part in _elsewhere(parts, device))
    free = free_bytes_on(device)
    if num_bytes == 0 or free is None or num_bytes <= DATA_SHARE * free:
        with contextlib.suppress(torch.OutOfMemoryError):  # another process took it meanwhile
            return [part.to(device) for part in parts]
    _LOG.warning(
        "%s: %.1f GB of data is more than half of what is free there; it stays on the host, which "
        "gathers and copies every batch",
        device,
        num_bytes / 1e9,
    )
    return parts


def _elsewhere(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors that are not on the device; without an index any card of it will do."""
    return [
        part
        for part in parts
        if part.device.type != device.type or device.index not in (None, part.device.index)
    ]


def free_bytes_on(device: torch.device) -> int | None:
    """Return how much of a device's own memory is free; None where torch does not say.

    What torch keeps for later is free too.
    """
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + unused)
