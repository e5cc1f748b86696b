"""Handwritten digits: 1,797 8x8 images included in scikit-learn; needs no network."""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UsageError, nearest
from .by_name import Benchmark
from .task import Task

_TRAIN_COUNTS = (142, 146, 142, 146, 145, 145, 145, 143, 139, 144)
"""Training images per class; the others are test images."""


class Digits(Benchmark):
    """1,437 training and 360 test images, ten classes, stratified.

    Models: ``"cnn"`` (the default) and ``"cnn-batchnorm"``.
    """

    default_model = "cnn"

    def task(self, data: str, model: str) -> Task:
        """Return the task; `data` must be empty."""
        if data:
            raise UsageError(
                f"data = {data!r}: the digits are part of scikit-learn; leave data empty, or use "
                "another task"
            )
        make = self._maker(model)
        train, test = _split()
        return Task(model=make, train=train, test=test)

    def saved_model(
        self, name: str, tensors: Mapping[str, Tensor], dropout: float | str
    ) -> nn.Module:
        """Return a new model; the digits have only one size."""
        return self._maker(name)()

    def _maker(self, name: str) -> Callable[[], nn.Module]:
        known = ("cnn", "cnn-batchnorm")
        if name not in known:
            raise UsageError(f"model = {name!r} is not known; {nearest(name, known)}")
        return functools.partial(small_cnn, name == "cnn-batchnorm")


BENCHMARKS: Mapping[str, Benchmark] = {"digits": Digits()}


def small_cnn(batch_norm: bool = False) -> nn.Module:
    """Return a network of two convolutions and two linear layers for 1x8x8 inputs.

    It has 151,306 parameters.
    """
    norms = [nn.BatchNorm2d(32), nn.BatchNorm2d(64)] if batch_norm else [nn.Identity()] * 2
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        norms[0],
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        norms[1],
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _split() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the parts of ``train_test_split(test_size=360, stratify=labels, random_state=0)``.

    Reads scikit-learn's file without importing scikit-learn, which takes longer than torch.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise UsageError("the digits are part of scikit-learn, which is not installed")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",")
    labels = table[:, -1].astype(np.int64)
    draws = np.random.RandomState(0)  # as in scikit-learn
    draws.bytes(8)  # scikit-learn draws these to break ties between classes
    chosen = [
        np.split(draws.permutation(np.flatnonzero(labels == label)), [count])
        for label, count in enumerate(_TRAIN_COUNTS)
    ]
    train, test = (draws.permutation(np.concatenate(part)) for part in zip(*chosen, strict=True))
    images = torch.as_tensor(table[:, :-1], dtype=torch.float32).view(-1, 1, 8, 8)
    (train_images, train_labels), (test_images, test_labels) = (
        (images[part], torch.from_numpy(labels[part])) for part in (train, test)
    )
    mean, std = train_images.mean(), train_images.std()
    return ((train_images - mean) / std, train_labels), ((test_images - mean) / std, test_labels)
