"""Handwritten digits: 1,797 real 8x8 images that scikit-learn ships; needs no network."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from ..errors import UsageError, nearest
from .task import Task

TEST_SAMPLES = 360
NUM_CLASSES = 10

_BATCH_NORM = {"cnn": False, "cnn-batchnorm": True}


def digits(data: str = "", model: str = "") -> Task:
    """Return the task: 1,437 training and 360 test images, ten classes, stratified.

    Parameters
    ----------
    data : str (default: "")
        Must be empty: the images come with scikit-learn.
    model : str (default: "")
        ``"cnn"`` (the default) or ``"cnn-batchnorm"``.

    Raises
    ------
    UsageError
        If `data` is not empty or the model is not known.
    """
    if data:
        raise UsageError(
            f"data = {data!r}: the digits come with scikit-learn; leave data empty, or name "
            "another task"
        )
    batch_norm = _batch_norm(model)
    train, test = _split()
    return Task(model=lambda: small_cnn(batch_norm), train=train, test=test)


def model(name: str = "", num_classes: int = NUM_CLASSES) -> nn.Module:
    """Return a fresh model, without looking at the data.

    Raises
    ------
    UsageError
        If there is no such model, or not for so many classes.
    """
    if num_classes != NUM_CLASSES:
        raise UsageError(f"the digits have {NUM_CLASSES} classes, but the model {num_classes}")
    return small_cnn(_batch_norm(name))


def small_cnn(batch_norm: bool = False) -> nn.Module:
    """Return two convolutions and two linear layers for 1x8x8 inputs; 151,306 parameters."""
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


def _batch_norm(name: str) -> bool:
    name = name or "cnn"
    if name not in _BATCH_NORM:
        raise UsageError(f"model = {name!r} is not known; {nearest(name, _BATCH_NORM)}")
    return _BATCH_NORM[name]


def _split() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    bunch = load_digits()
    parts = train_test_split(
        bunch.images, bunch.target, test_size=TEST_SAMPLES, random_state=0, stratify=bunch.target
    )
    train_images, test_images = (_images(part) for part in parts[:2])
    mean, std = train_images.mean(), train_images.std()
    train_labels, test_labels = (torch.from_numpy(part).long() for part in parts[2:])
    return ((train_images - mean) / std, train_labels), ((test_images - mean) / std, test_labels)


def _images(images: object) -> Tensor:
    return torch.as_tensor(images, dtype=torch.float32).unsqueeze(1)
