"""Tiny ImageNet, 200 classes of ImageNet at 64x64, with a pretrained ViT-B/16."""

import functools

from torch import nn

from ..data.entry import Prepared
from ..data.image_data import prepared_images
from ..data.image_sets import TINY_IMAGENET
from ..models.pixels import IMAGENET_MEAN, IMAGENET_STD
from .augmentation import random_crop_and_flip
from .image_models import Dropout, ImageModels, image_task
from .task import Task

MODELS = ImageModels(
    default="vit-b-16", mean=IMAGENET_MEAN, std=IMAGENET_STD, side=TINY_IMAGENET.side
)
"""The models for it."""

_augment = functools.partial(random_crop_and_flip, padding=8)


def tiny_imagenet(
    data: str = "",
    model: str = "",
    *,
    skip_bad: bool = False,
    max_samples: int = 0,
    dropout: Dropout = "auto",
    pretrained: bool = True,
) -> Task:
    """Return the task: 100,000 training images, tested on the 10,000 of the validation split.

    Images are kept and augmented at 64x64; a vision transformer brings them to its own size.

    Parameters
    ----------
    data : str (default: "")
        A folder with the images; empty for the hub's ``zh-plus/tiny-imagenet``.
    model : str (default: "")
        ``"vit-b-16"`` (the default), ``"vit-micro-16"``, a Hugging Face folder of a ViT, or a
        ``wrn-DEPTH-WIDTH``.
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
    return image_task(MODELS, images, model, _augment, dropout, pretrained)


def prepare(
    data: str = "",
    model: str = "",
    *,
    skip_bad: bool = False,
    max_samples: int = 0,
    again: bool = False,
) -> Prepared:
    """Return the decoded images; see `tiny_imagenet` and `prepared_images`."""
    MODELS.maker(model)
    return prepared_images(
        TINY_IMAGENET, data, skip_bad=skip_bad, max_samples=max_samples, again=again
    )


def check_weights(model: str = "") -> None:
    """Refuse a model whose published weights cannot be had; see `ImageModels.check_weights`."""
    MODELS.check_weights(model)


def model(name: str = "", num_classes: int = 200) -> nn.Module:
    """Return a fresh model, without looking at the data.

    Raises
    ------
    UsageError
        If there is no such model.
    """
    return MODELS.maker(name)(num_classes=num_classes)
