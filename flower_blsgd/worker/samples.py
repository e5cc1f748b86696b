"""The kinds of data sets that a worker reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

Samples = Any
"""A pair (inputs, targets) of tensors, arrays or memory maps; a TensorDataset; any map-style
Dataset of pairs; `HostSamples`; or `IndexedSamples` of one of these."""


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
