"""CIFAR-10, or one's own images of 32x32 in its layout, with the ResNets of its paper."""

import functools
from collections.abc import Callable, Mapping

from torch import nn

from ..data.entry import Prepared
from ..data.image_data import prepared_images
from ..data.image_sets import CIFAR10
from ..errors import UsageError, nearest
from ..models.resnet import resnet8, resnet20
from .augmentation import random_crop_and_flip
from .task import Task

_MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "resnet20": resnet20,
    "resnet8": resnet8,
    "resnet20-b": functools.partial(resnet20, shortcut="B"),
}


def cifar10(
    data: str = "", model: str = "", *, skip_bad: bool = False, max_samples: int = 0
) -> Task:
    """Return the task: 50,000 training and 10,000 test images, ten classes.

    Parameters
    ----------
    data : str (default: "")
        A folder with parquet files, image folders or CIFAR-10's binary version; empty for the
        hub's ``uoft-cs/cifar10``.
    model : str (default: "")
        ``"resnet20"`` (the default), ``"resnet8"`` or ``"resnet20-b"``.
    skip_bad : bool (default: False)
        Leave images out that cannot be decoded.
    max_samples : int (default: 0)
        Only the first so many images of each split; 0: all.

    Raises
    ------
    UsageError
        If the data cannot be had, or the model is not known.
    """
    make = _maker(model)
    images = prepare(data, model, skip_bad=skip_bad, max_samples=max_samples)
    return Task(
        model=functools.partial(make, num_classes=len(images.class_names)),
        train=images.train,
        test=images.test,
        augment=random_crop_and_flip,
        data_fingerprint=images.fingerprint,
    )


def prepare(
    data: str = "",
    model: str = "",
    *,
    again: bool = False,
    skip_bad: bool = False,
    max_samples: int = 0,
) -> Prepared:
    """Return the images of the task, decoding them if that was not done yet.

    Parameters
    ----------
    data, model, skip_bad, max_samples
        As of `cifar10`.
    again : bool (default: False)
        Also if it was done.

    Raises
    ------
    UsageError
        As by `cifar10`.
    """
    _maker(model)  # refused before anything is decoded
    return prepared_images(CIFAR10, data, skip_bad=skip_bad, max_samples=max_samples, again=again)


def model(name: str = "", num_classes: int = 10) -> nn.Module:
    """Return a fresh model, without looking at the data.

    Raises
    ------
    UsageError
        If there is no such model.
    """
    return _maker(name)(num_classes=num_classes)


def _maker(name: str) -> Callable[..., nn.Module]:
    name = name or "resnet20"
    if name not in _MODELS:
        raise UsageError(f"model = {name!r} is not known; {nearest(name, _MODELS)}")
    return _MODELS[name]
