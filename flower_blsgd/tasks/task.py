"""What is trained: data, model, loss and metric, in one object."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..worker.batches import Samples, num_samples, tensor_parts
from ..worker.local_sgd import SampleLoss, cross_entropy

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""(inputs, generator) -> inputs: changes a whole training batch at random."""


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
    train, test : pair of tensors or numpy arrays, TensorDataset or map-style Dataset
        Inputs and targets; every worker reads all of `train`. Of a pair either part may be a
        numpy array or a memory map.
    loss : callable (default: cross entropy)
        ``(outputs, targets) -> losses`` of shape (batch_size,).
    metric : callable (default: `correct`)
        ``(outputs, targets) -> values`` of shape (batch_size,); its mean over the test set is
        reported as ``accuracy``.
    augment : callable, optional
        ``(inputs, generator) -> inputs``: changes a whole batch, in training only, on the
        device. Its random numbers come from the generator, which lives on that device.
    data_fingerprint : str (default: "")
        What `fingerprint` returns; empty to hash the training data.
    pretrained : callable, optional
        Puts the weights to begin with into a fresh model, in place: ``(model) -> None``. Called
        once in a run, by the server; workers get the weights from it.
    evaluation_batch_size : int (default: 1024)
        Samples per batch in evaluation, where nothing is kept for a backward pass.
    assets : mapping (default: empty)
        Files that a saved model needs, such as the tokenizer, by the names that they get in the
        results folder. Data that belong to other ones are refused when the model is evaluated.

    Raises
    ------
    UsageError
        If a part of the data is empty or its inputs and targets differ in number, `model` does
        not make models, or an asset has no plain name.
    """

    model: Callable[[], nn.Module]
    train: Samples
    test: Samples
    loss: SampleLoss = cross_entropy
    metric: Callable[[Any, Tensor], Tensor] = correct
    augment: Augment | None = None
    data_fingerprint: str = ""
    pretrained: Callable[[nn.Module], None] | None = None
    evaluation_batch_size: int = 1024
    assets: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise UsageError(
                f"task: model is a {type(self.model).__name__}, but must be a function that makes "
                "a fresh one, such as model=lambda: Net()"
            )
        optional = [name for name in ("augment", "pretrained") if getattr(self, name) is not None]
        for name in ("loss", "metric", *optional):
            if not callable(getattr(self, name)):
                kind = type(getattr(self, name)).__name__
                raise UsageError(f"task: {name} is a {kind}, but must be a function")
        if self.evaluation_batch_size < 1:
            raise UsageError(
                f"task: evaluation_batch_size is {self.evaluation_batch_size}, but must be at "
                "least 1"
            )
        for name in self.assets:
            if name in ("", ".", "..") or set(name) & set("/\\"):
                raise UsageError(f"task: assets names {name!r}, but needs the plain name of a file")
        _check_samples("train", self.train)
        _check_samples("test", self.test)

    @property
    def num_train(self) -> int:
        """N."""
        return num_samples(self.train)

    @property
    def num_test(self) -> int:
        """Samples of the test set."""
        return num_samples(self.test)

    def fresh_model(self, seed: int) -> nn.Module:
        """Return a model whose weights are all a pure function of the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    def initial_model(self, seed: int) -> nn.Module:
        """Return the model to begin with: a fresh one, with pretrained weights where there are any.

        What `pretrained` draws at random, such as a new last layer, follows from the seed as well.

        Raises
        ------
        UsageError
            If these cannot be had.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
            if self.pretrained is not None:
                self.pretrained(model)
        return model

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal for equal training data.

        Tensors and arrays are hashed whole; of another data set only its length counts.
        """
        if self.data_fingerprint:
            return self.data_fingerprint
        digest = hashlib.sha256(str(self.num_train).encode())
        for part in tensor_parts(self.train) or ():
            digest.update(str((part.dtype, tuple(part.shape))).encode())
            digest.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]


def _check_samples(name: str, samples: Samples) -> None:
    try:
        lengths = [len(part) for part in tensor_parts(samples) or ()]
        count = num_samples(samples)
    except TypeError as error:
        raise UsageError(
            f"task: {name} has no length ({error}); use a pair (inputs, targets) of tensors or "
            "numpy arrays, or a map-style Dataset of pairs"
        ) from None
    if lengths and len(lengths) != 2:
        raise UsageError(
            f"task: {name} has {len(lengths)} parts; use a pair (inputs, targets), or a map-style "
            "Dataset of pairs"
        )
    if lengths and lengths[0] != lengths[1]:
        raise UsageError(
            f"task: {name} has {lengths[0]} inputs, but {lengths[1]} targets; each sample needs "
            "one of both"
        )
    if count == 0:
        raise UsageError(f"task: {name} is empty; it needs at least one sample")
