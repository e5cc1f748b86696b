"""The data sets that a worker reads, where they lie, and the batch of a step from them."""

import contextlib
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

_LOG = logging.getLogger(__name__)

DATA_SHARE = 0.5
"""Of an accelerator's free memory; the rest is for models, their steps, and other workers."""

Samples = Any
"""A pair (inputs, targets) of tensors, arrays or memory maps; a TensorDataset; any map-style
Dataset of pairs; `HostSamples`; or `IndexedSamples` of one of these."""


# --- kinds of data sets


@dataclass(frozen=True)
class IndexedSamples:
    """A part of a data set, named by indices; nothing is copied.

    Parameters
    ----------
    samples : Samples
        The whole.
    indices : numpy.ndarray
        int64 of shape (n,): which of its samples these are.
    """

    samples: Samples
    indices: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class HostSamples:
    """Tensors that stay where they are, whatever device a worker computes on.

    Parameters
    ----------
    parts : sequence of torch.Tensor
        Inputs and targets, of equal length. Memory maps stay such.
    """

    parts: Sequence[Tensor]


def num_samples(samples: Samples) -> int:
    """Return how many samples a data set has."""
    tensors = tensor_parts(samples)
    return len(samples) if tensors is None else len(tensors[0])


def tensor_parts(samples: Samples) -> Sequence[Tensor] | None:
    """Return the tensors that a data set consists of; None if it is of another kind.

    Arrays become tensors that share their memory.
    """
    if isinstance(samples, HostSamples):
        return samples.parts
    if isinstance(samples, TensorDataset):
        return samples.tensors
    kinds = Tensor | np.ndarray
    if isinstance(samples, tuple | list) and all(isinstance(part, kinds) for part in samples):
        return [part if isinstance(part, Tensor) else torch.from_numpy(part) for part in samples]
    return None


# --- where they lie


def samples_on(samples: Samples, device: str | torch.device) -> Samples:
    """Return the same data set with its tensors on the device; of another kind as it is.

    What is made of it there, such as a `LocalSGD`, then has no copy of its own. On a CPU nothing
    is copied: a memory map stays one. Tensors that would take more than half of the device's free
    memory become `HostSamples`, and one line in the log says so.
    """
    device = torch.device(device)
    if isinstance(samples, IndexedSamples):
        return IndexedSamples(samples_on(samples.samples, device), samples.indices)
    parts = tensor_parts(samples)
    if parts is None or isinstance(samples, HostSamples):
        return samples
    num_bytes = bytes_to_move(parts, device)
    if num_bytes == 0:
        return samples
    free = free_bytes_on(device)
    if free is None or num_bytes <= DATA_SHARE * free:
        with contextlib.suppress(torch.OutOfMemoryError):  # another process took it meanwhile
            return [part.to(device) for part in parts]
    _log_host(num_bytes, str(device))
    return HostSamples(parts)


def free_bytes_on(device: torch.device) -> int | None:
    """Return how much of a device's memory a process can still take; None where it has no own.

    What torch keeps for later is free too.
    """
    if device.type not in ("cuda", "xpu"):
        return None
    backend = getattr(torch, device.type)
    unused = backend.memory_reserved(device) - backend.memory_allocated(device)
    return int(backend.mem_get_info(device)[0] + unused)


def bytes_to_move(parts: Sequence[Tensor], device: torch.device) -> int:
    """Return the bytes of the tensors that are not on the device."""
    return sum(
        part.nbytes
        for part in parts
        if part.device.type != device.type or device.index not in (None, part.device.index)
    )


@functools.cache  # once for a data set and a device: evaluation comes here again every time
def _log_host(num_bytes: int, device: str) -> None:
    _LOG.warning(
        "%s: %.1f GB of data is more than half of what is free there; it stays on the host, which "
        "gathers and copies every batch",
        device,
        num_bytes / 1e9,
    )


# --- batches


class BatchSource:
    """Yields a batch for given indices."""

    on_device = False
    """Whether the samples are on the worker's device, so that the host has no part in it."""

    def __len__(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of the samples, on the worker's device.

        The indices may lie anywhere. Nobody waits for a copy of them if they are on the device
        where `on_device` holds, else on the host.
        """
        raise NotImplementedError


def batch_source(samples: Samples, device: torch.device) -> BatchSource:
    """Return the fitting source for a data set; see `samples_on` for what stays on the host.

    Raises
    ------
    ValueError
        If it is a sequence of tensors, but no pair of the same length.
    """
    if isinstance(samples, IndexedSamples):
        return IndexedBatches(batch_source(samples.samples, device), samples.indices, device)
    tensors = tensor_parts(samples)
    if tensors is None:
        return DatasetBatches(samples, device)
    if len(tensors) != 2:
        raise ValueError(f"expected a pair (inputs, targets), got {len(tensors)} tensors")
    if len(tensors[0]) != len(tensors[1]):
        raise ValueError(f"{len(tensors[0])} inputs, but {len(tensors[1])} targets")
    there = samples_on(samples, device)
    kind = HostBatches if isinstance(there, HostSamples) else TensorBatches
    return kind(tensor_parts(there) or (), device)


class TensorBatches(BatchSource):
    """A pair of tensors that live on the device, so that a batch is one gather."""

    on_device = True

    def __init__(self, parts: Sequence[Tensor], device: torch.device) -> None:
        self._inputs, self._targets = (part.to(device) for part in parts)

    def __len__(self) -> int:
        return len(self._inputs)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples."""
        return self._inputs[indices], self._targets[indices]


class HostBatches(BatchSource):
    """Gathers each batch on the host and copies it to the device, without waiting for that.

    To CUDA the copy goes through page-locked memory, which torch keeps and uses again when the
    copy is done; so the host gathers the next batch while the device computes.
    """

    def __init__(self, parts: Sequence[Tensor], device: torch.device) -> None:
        self._inputs, self._targets = parts
        self._device = device

    def __len__(self) -> int:
        return len(self._inputs)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples, on the device."""
        indices = indices.cpu()
        return self._gather(self._inputs, indices), self._gather(self._targets, indices)

    def _gather(self, part: Tensor, indices: Tensor) -> Tensor:
        if part.device.type != "cpu":  # a tensor that its owner put on some device
            return part[indices.to(part.device)].to(self._device)
        pin = self._device.type == "cuda"
        rows = torch.empty((len(indices), *part.shape[1:]), dtype=part.dtype, pin_memory=pin)
        torch.index_select(part, 0, indices, out=rows)
        return rows.to(self._device, non_blocking=pin)


class DatasetBatches(BatchSource):
    """Any map-style Dataset of (input, target) pairs, collated sample by sample."""

    def __init__(self, dataset: Any, device: torch.device) -> None:
        self._dataset, self._device = dataset, device

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        """Return collated inputs and targets of the samples."""
        inputs, targets = default_collate([self._dataset[i] for i in indices.tolist()])
        return inputs.to(self._device), targets.to(self._device)


class IndexedBatches(BatchSource):
    """A part of another source."""

    def __init__(
        self, whole: BatchSource, indices: npt.NDArray[np.int64], device: torch.device
    ) -> None:
        self._whole, self.on_device = whole, whole.on_device
        self._indices = torch.from_numpy(indices).to(device if whole.on_device else "cpu")

    def __len__(self) -> int:
        return len(self._indices)

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of the samples."""
        return self._whole.batch(self._indices[indices.to(self._indices.device)])
