"""Fetch the samples of one step by their indices."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from .device_samples import samples_on
from .host_batches import HostBatches
from .samples import HostSamples, IndexedSamples, Samples, num_samples, tensor_parts

__all__ = [
    "BatchSource",
    "DatasetBatches",
    "IndexedBatches",
    "IndexedSamples",
    "Samples",
    "TensorBatches",
    "batch_source",
    "num_samples",
    "tensor_parts",
]


class BatchSource(Protocol):
    """Something that yields a batch for given indices."""

    @property
    def on_device(self) -> bool:
        """Whether the samples are on the worker's device, so that the host has no part in it."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of the samples, on the worker's device.

        The indices may lie anywhere. Nobody waits for a copy of them if they are on the device
        where `on_device` holds, else on the host.
        """
        ...


class TensorBatches:
    """Tensors that live on the device, so that a batch is one gather.

    Parameters
    ----------
    inputs, targets : torch.Tensor
        First dimension N. A memory map stays one on a CPU.
    device : torch.device
        Where they are kept.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, device: torch.device) -> None:
        self._inputs, self._targets = inputs.to(device), targets.to(device)

    @property
    def on_device(self) -> bool:
        """Return True."""
        return True

    def __len__(self) -> int:
        return len(self._inputs)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples."""
        return self._inputs[indices], self._targets[indices]


class DatasetBatches:
    """Any map-style Dataset of (input, target) pairs, collated sample by sample."""

    def __init__(self, dataset: Any, device: torch.device) -> None:
        self._dataset, self._device = dataset, device

    @property
    def on_device(self) -> bool:
        """Return False: the host makes every sample."""
        return False

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        """Return collated inputs and targets of the samples."""
        inputs, targets = default_collate([self._dataset[i] for i in indices.tolist()])
        return inputs.to(self._device), targets.to(self._device)


class IndexedBatches:
    """A part of another source."""

    def __init__(self, whole: BatchSource, indices: Tensor) -> None:
        self._whole, self._indices = whole, indices

    @property
    def on_device(self) -> bool:
        """Whether that source is."""
        return self._whole.on_device

    def __len__(self) -> int:
        return len(self._indices)

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of the samples."""
        return self._whole.batch(self._indices[indices.to(self._indices.device)])


def batch_source(samples: Samples, device: torch.device) -> BatchSource:
    """Return the fitting source for a data set; see `samples_on` for what stays on the host.

    Raises
    ------
    ValueError
        If it is a sequence of tensors, but no pair of the same length.
    """
    if isinstance(samples, IndexedSamples):
        whole = batch_source(samples.samples, device)
        indices = torch.from_numpy(samples.indices)
        return IndexedBatches(whole, indices.to(device) if whole.on_device else indices)
    tensors = tensor_parts(samples)
    if tensors is None:
        return DatasetBatches(samples, device)
    if len(tensors) != 2:
        raise ValueError(f"expected a pair (inputs, targets), got {len(tensors)} tensors")
    if len(tensors[0]) != len(tensors[1]):
        raise ValueError(f"{len(tensors[0])} inputs, but {len(tensors[1])} targets")
    placed = samples_on(samples, device)
    if isinstance(placed, HostSamples):
        return HostBatches(placed, device)
    inputs, targets = tensor_parts(placed) or ()
    return TensorBatches(inputs, targets, device)
