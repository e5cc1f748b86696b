"""Fetch the samples of one step by their indices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

Samples = Any
"""A pair (inputs, targets) of tensors, arrays or memory maps; a TensorDataset; any map-style
Dataset of pairs; or `IndexedSamples` of one of these."""


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
        """Return inputs and targets of the samples, on the worker's device."""
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
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs, but {len(targets)} targets")
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
        return self._whole.batch(self._indices[indices])


def batch_source(samples: Samples, device: torch.device) -> BatchSource:
    """Return the fitting source for a data set.

    Raises
    ------
    ValueError
        If it is a sequence of tensors, but no pair of the same length.
    """
    if isinstance(samples, IndexedSamples):
        whole = batch_source(samples.samples, device)
        return IndexedBatches(whole, torch.from_numpy(samples.indices).to(device))
    tensors = tensor_parts(samples)
    if tensors is None:
        return DatasetBatches(samples, device)
    if len(tensors) != 2:
        raise ValueError(f"expected a pair (inputs, targets), got {len(tensors)} tensors")
    return TensorBatches(tensors[0], tensors[1], device)


def num_samples(samples: Samples) -> int:
    """Return how many samples a data set has."""
    tensors = tensor_parts(samples)
    return len(samples) if tensors is None else len(tensors[0])


def tensor_parts(samples: Samples) -> Sequence[Tensor] | None:
    """Return the tensors that a data set consists of; None if it is of another kind.

    Arrays become tensors that share their memory.
    """
    if isinstance(samples, TensorDataset):
        return samples.tensors
    kinds = Tensor | np.ndarray
    if isinstance(samples, tuple | list) and all(isinstance(part, kinds) for part in samples):
        return [part if isinstance(part, Tensor) else torch.from_numpy(part) for part in samples]
    return None
