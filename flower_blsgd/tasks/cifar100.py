"""CIFAR-100 with WRN-28-10, as in the paper of the wide ResNets."""

import functools

from torch import nn

from ..data.entry import Prepared
from ..data.image_data import prepared_images
from ..data.image_sets import CIFAR100
from ..models.pixels import CIFAR100_MEAN, CIFAR100_STD
from ..models.resnet import resnet8, resnet20
from .augmentation import random_crop_and_flip
from .image_models import Dropout, ImageModels, image_task
from .task import Task

MODELS = ImageModels(
    default="wrn-28-10",
    mean=CIFAR100_MEAN,
    std=CIFAR100_STD,
    side=CIFAR100.side,
    others={
        "resnet20": resnet20,
        "resnet8": resnet8,
        "resnet20-b": functools.partial(resnet20, shortcut="B"),
    },
)
"""The models for it."""


def cifar100(
    data: str = "",
    model: str = "",
    *,
    skip_bad: bool = False,
    max_samples: int = 0,
    dropout: Dropout = "auto",
    pretrained: bool = True,
) -> Task:
    """Return the task: 50,000 training and 10,000 test images of 32x32, a hundred classes.

    Parameters
    ----------
    data : str (default: "")
        A folder with the images; empty for the hub's ``uoft-cs/cifar100``.
    model : str (default: "")
        ``"wrn-28-10"`` (the default) or another ``wrn-DEPTH-WIDTH``, ``"resnet20"``,
        ``"resnet8"``, ``"resnet20-b"``, ``"vit-b-16"``, ``"vit-micro-16"`` or a Hugging Face
        folder of a ViT.
    skip_bad : bool (default: False)
        Leave images out that cannot be decoded.
    max_samples : int (default: 0)
        Only the first so many for training and for testing; 0: all.
    dropout : float or "auto" (default: "auto")
        Of a wide ResNet; ``"auto"``: none.
    pretrained : bool (default: True)
        Begin with published weights, where the model has some.

    Raises
    ------
    UsageError
        If the data cannot be had, or there is no such model.
    """
    MODELS.maker(model, dropout)  # refused before anything is decoded
    images = prepare(data, model, skip_bad=skip_bad, max_samples=max_samples)
    return image_task(MODELS, images, model, random_crop_and_flip, dropout, pretrained)


def prepare(
    data: str = "",
    model: str = "",
    *,
    skip_bad: bool = False,
    max_samples: int = 0,
    again: bool = False,
) -> Prepared:
    """Return the decoded images; see `cifar100` and `prepared_images`."""
    MODELS.maker(model)
    return prepared_images(CIFAR100, data, skip_bad=skip_bad, max_samples=max_samples, again=again)


def check_weights(model: str = "") -> None:
    """Refuse a model whose published weights cannot be had; see `ImageModels.check_weights`."""
    MODELS.check_weights(model)


def model(name: str = "", num_classes: int = 100) -> nn.Module:
    """Return a fresh model, without looking at the data.

    Raises
    ------
    UsageError
        If there is no such model.
    """
    return MODELS.maker(name)(num_classes=num_classes)
