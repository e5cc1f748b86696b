"""Data sets of a worker, their location in memory, and the batches of its steps."""

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
"""Share of an accelerator's free memory that data may use."""

Samples = Any
"""A pair (inputs, targets) of tensors, arrays or memory maps; a TensorDataset; a map-style Dataset
of pairs; or a `Subset` of one of these, which is not copied."""


def num_samples(samples: Samples) -> int:
    """Return the number of samples of a data set."""
    tensors = tensor_parts(samples)
    return len(samples) if tensors is None else len(tensors[0])


def tensor_parts(samples: Samples) -> Sequence[Tensor] | None:
    """Return the tensors of a data set; None if it does not consist of tensors or arrays.

    Arrays become tensors that share their memory. UsageError if torch cannot read an array's
    memory.
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
            "become a tensor; copy it with np.ascontiguousarray(x, x.dtype.newbyteorder('='))"
        )
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # about read-only arrays
        return torch.from_numpy(array)


class BatchSource:
    """Source of batches on a worker's device, gathered by sample index.

    Tensors move to an accelerator once, as a whole, so that a batch is one gather operation there.
    Tensors that would take more than half of its free memory stay on the host, with one line in the
    log. In this case, and for other data sets, the host assembles every batch. CUDA gets it through
    page-locked memory, so that the host can gather the next batch while the device computes.

    Parameters
    ----------
    samples : Samples
        The data set.
    device : torch.device
        The worker's device.
    move : bool (default: True)
        Whether tensors may move to the device as a whole. On a CPU, they never do, and memory maps
        stay memory maps.

    Attributes
    ----------
    on_device : bool
        Whether the samples are on the device, so that batches need no work on the host.

    Raises
    ------
    ValueError
        If the data set is a sequence of tensors other than a pair of the same length.
    """

    def __init__(self, samples: Samples, device: torch.device, move: bool = True) -> None:
        self._device = device
        self._chosen: Tensor | None = None
        if type(samples) is Subset:  # subclasses may change samples
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

        The indices may be on any device. They need no copy if they are on the worker's device (with
        `on_device`) or on the host (without).
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
    """Return the inputs and targets of a collated batch; ValueError if it is not a pair."""
    parts = batch if isinstance(batch, tuple | list) else [batch]
    if len(parts) != 2 or not all(hasattr(part, "to") for part in parts):
        raise ValueError(
            "a sample of a Dataset must be a pair (inputs, targets) of tensors, arrays or numbers; "
            f"found {', '.join(type(part).__name__ for part in parts)}"
        )
    return parts[0], parts[1]


def _moved(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Copy the tensors to the device; return them unchanged if it has too little memory."""
    num_bytes = sum(part.nbytes for part in _elsewhere(parts, device))
    free = free_bytes_on(device)
    if num_bytes == 0 or free is None or num_bytes <= DATA_SHARE * free:
        with contextlib.suppress(torch.OutOfMemoryError):  # taken by another process
            return [part.to(device) for part in parts]
    _LOG.warning(
        "%s: %.1f GB of data is more than half of the free memory; it stays on the host, which "
        "gathers and copies every batch",
        device,
        num_bytes / 1e9,
    )
    return parts


def _elsewhere(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors that are not on the device; without an index, any card matches."""
    return [
        part
        for part in parts
        if part.device.type != device.type or device.index not in (None, part.device.index)
    ]


def free_bytes_on(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes; None if torch does not report it.

    Memory that torch has reserved but not allocated counts as free.
    """
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + unused)
