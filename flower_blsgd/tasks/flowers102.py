"""Oxford Flowers-102 at 224x224, with a WRN-16-8 that has the first layer of ImageNet's ResNets."""

import functools

from torch import nn

from ..data.entry import Prepared
from ..data.image_data import ImageData, prepared_images
from ..data.image_sets import FLOWERS102
from ..errors import UsageError, nearest
from ..models.pixels import IMAGENET_MEAN, IMAGENET_STD
from .augmentation import random_resized_crop_and_flip
from .image_models import Dropout, ImageModels, image_task
from .task import Task

SIDE = 224
"""What models see of images that are kept somewhat larger."""

MODELS = ImageModels(
    default="wrn-16-8", mean=IMAGENET_MEAN, std=IMAGENET_STD, side=SIDE, stem="7x7"
)
"""The models for it."""

_DEFAULT_SPLIT = "official"

_augment = functools.partial(random_resized_crop_and_flip, side=SIDE)


def flowers102(
    data: str = "",
    model: str = "",
    *,
    split: str = "",
    skip_bad: bool = False,
    max_samples: int = 0,
    dropout: Dropout = "auto",
    pretrained: bool = True,
) -> Task:
    """Return the task: trained on random boxes of the images, tested on their middle.

    Parameters
    ----------
    data : str (default: "")
        A folder with the images; empty for the hub's ``dpdl-benchmark/oxford_flowers102``.
    model : str (default: "")
        ``"wrn-16-8"`` (the default) or another ``wrn-DEPTH-WIDTH``, ``"vit-b-16"``,
        ``"vit-micro-16"`` or a Hugging Face folder of a ViT.
    split : str (default: "")
        ``"official"`` (the default): 1,020 images to train on, 6,149 to test on. ``"paper"``:
        all of these to train on, the 1,020 of the validation split to test on.
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
        If the data cannot be had, or there is no such model or split.
    """
    MODELS.maker(model, dropout)  # refused before anything is decoded
    images = prepare(data, model, split=split, skip_bad=skip_bad, max_samples=max_samples)
    return image_task(MODELS, images, model, _augment, dropout, pretrained)


def prepare(
    data: str = "",
    model: str = "",
    *,
    split: str = "",
    skip_bad: bool = False,
    max_samples: int = 0,
    again: bool = False,
) -> Prepared:
    """Return the decoded images; see `flowers102` and `prepared_images`."""
    MODELS.maker(model)
    return prepared_images(
        _cut(split), data, skip_bad=skip_bad, max_samples=max_samples, again=again
    )


def check_weights(model: str = "") -> None:
    """Refuse a model whose published weights cannot be had; see `ImageModels.check_weights`."""
    MODELS.check_weights(model)


def model(name: str = "", num_classes: int = 102) -> nn.Module:
    """Return a fresh model, without looking at the data.

    Raises
    ------
    UsageError
        If there is no such model.
    """
    return MODELS.maker(name)(num_classes=num_classes)


def _cut(split: str) -> ImageData:
    split = split or _DEFAULT_SPLIT
    if split not in FLOWERS102:
        raise UsageError(f"split = {split!r} is not known; {nearest(split, FLOWERS102)}")
    return FLOWERS102[split]
