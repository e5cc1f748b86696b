"""What is trained: data, model, loss and metric, in one object."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..worker.batches import Samples, num_samples, tensor_parts
from ..worker.local_sgd import SampleLoss, cross_entropy


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1.0 for every sample whose class was hit, else 0.0; shape (batch_size,)."""
    return (outputs.argmax(dim=1) == targets).float()


@dataclass(frozen=True)
class Task:
    """A training task.

    Parameters
    ----------
    model : callable
        Makes a fresh model, with weights drawn from torch's generator.
    train, test : pair of tensors, TensorDataset or map-style Dataset
        Inputs and targets; every worker reads all of `train`.
    loss : callable (default: cross entropy)
        ``(outputs, targets) -> losses`` of shape (batch_size,).
    metric : callable (default: `correct`)
        ``(outputs, targets) -> values`` of shape (batch_size,); its mean over the test set is
        reported as ``accuracy``.
    """

    model: Callable[[], nn.Module]
    train: Samples
    test: Samples
    loss: SampleLoss = cross_entropy
    metric: Callable[[Any, Tensor], Tensor] = correct

    @property
    def num_train(self) -> int:
        """N."""
        return num_samples(self.train)

    @property
    def num_test(self) -> int:
        """Samples of the test set."""
        return num_samples(self.test)

    def initial_model(self, seed: int) -> nn.Module:
        """Return the model with weights that are a pure function of the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal for equal training data.

        Tensors are hashed whole; of another data set only its length counts.
        """
        digest = hashlib.sha256(str(self.num_train).encode())
        for part in tensor_parts(self.train) or ():
            digest.update(str((part.dtype, tuple(part.shape))).encode())
            digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]
