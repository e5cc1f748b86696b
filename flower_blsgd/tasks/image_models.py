"""Which models a task of images offers: by name, by pattern, or a folder with a ViT."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from ..data.entry import Prepared
from ..errors import UsageError, nearest
from ..models.pixels import CentreCrop, PixelNormalize
from ..models.vision_transformer import CONFIGS, check_vit_folder, vision_transformer
from ..models.vision_transformer_weights import find_weights, pretrained_weights
from ..models.wide_resnet import Stem, WideResNet, depth_and_width, is_wide_resnet
from .task import Augment, Task

MakeModel = Callable[..., nn.Module]
"""(num_classes=) -> a fresh model."""

Dropout = float | str
"""A share in [0, 1), or ``"auto"``."""


@dataclass(frozen=True)
class ImageModels:
    """The models of a task: wide ResNets, vision transformers, and its own.

    Parameters
    ----------
    default : str
        The name of the one that is meant where nobody says.
    mean, std : tuple of float
        Of each channel of the data, for values in [0, 1]; a vision transformer has its own.
    side : int
        Of the images that models see, in pixels. Larger ones are cut to it.
    stem : {"3x3", "7x7"} (default: "3x3")
        Of the wide ResNets.
    others : mapping (default: none)
        Other models by name: ``(num_classes=, pixels=) -> Module``.
    """

    default: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    side: int
    stem: Stem = "3x3"
    others: Mapping[str, Callable[..., nn.Module]] = field(default_factory=dict)

    def maker(self, name: str = "", dropout: Dropout = "auto") -> MakeModel:
        """Return what makes a model, with fresh weights; nothing is made yet.

        Raises
        ------
        UsageError
            If there is no such model, or it has no dropout and some is asked for.
        """
        name = name or self.default
        pixels = functools.partial(_pixels, self.mean, self.std, self.side)
        if is_wide_resnet(name):
            depth, width = depth_and_width(name)
            share = 0.0 if dropout == "auto" else float(dropout)
            return functools.partial(_wide_resnet, depth, width, share, self.stem, pixels)
        make: MakeModel
        if name in self.others:
            make = functools.partial(_other, self.others[name], pixels)
        elif _is_vision_transformer(name):
            if name not in CONFIGS:
                check_vit_folder(name)
            make = functools.partial(vision_transformer, name, crop=self.side)
        else:
            known = ["wrn-28-10", "wrn-16-8", *CONFIGS, *self.others]
            raise UsageError(
                f"model = {name!r} is neither a wrn-DEPTH-WIDTH nor a Hugging Face folder of a "
                f"ViT; {nearest(name, known)}"
            )
        if dropout not in ("auto", 0):
            raise UsageError(
                f"dropout = {dropout}: model = {name!r} is trained without; leave it out, or use "
                "a wrn-DEPTH-WIDTH"
            )
        return make

    def weights(self, name: str, pretrained: bool) -> Callable[[nn.Module], None] | None:
        """Return what puts published weights into a fresh model; None if it begins without."""
        name = name or self.default
        if not pretrained or is_wide_resnet(name) or name in self.others:
            return None
        return pretrained_weights(name)

    def check_weights(self, name: str) -> None:
        """Refuse a model whose published weights cannot be had; the hub's are downloaded.

        For the server alone, before data are prepared: workers need no weights.

        Raises
        ------
        UsageError
            If there is no such model, or its weights are out of reach.
        """
        self.maker(name)
        if self.weights(name, pretrained=True) is not None:
            find_weights(name or self.default)

    def evaluation_batch_size(self, name: str) -> int:
        """Return how many samples at once keep the outputs of a layer below some 200 MB."""
        name = name or self.default
        if name in self.others:
            return 1024
        small = is_wide_resnet(name) and self.stem == "3x3" and self.side <= 32
        return 256 if small else 64


def image_task(
    models: ImageModels,
    images: Prepared,
    model: str,
    augment: Augment,
    dropout: Dropout = "auto",
    pretrained: bool = True,
) -> Task:
    """Return the task of training a model on prepared images, for as many classes as they have.

    Parameters
    ----------
    models : ImageModels
        Where the model is looked up.
    images : Prepared
        The data.
    model : str
        The model's name; empty for the default.
    augment : callable
        Changes a batch in training.
    dropout : float or "auto" (default: "auto")
        Of the model.
    pretrained : bool (default: True)
        Begin with published weights, where the model has some.

    Raises
    ------
    UsageError
        As `ImageModels.maker` does.
    """
    return Task(
        model=functools.partial(models.maker(model, dropout), num_classes=len(images.class_names)),
        train=images.train,
        test=images.test,
        augment=augment,
        data_fingerprint=images.fingerprint,
        pretrained=models.weights(model, pretrained),
        evaluation_batch_size=models.evaluation_batch_size(model),
    )


def _is_vision_transformer(name: str) -> bool:
    return name in CONFIGS or Path(name).expanduser().is_dir()


def _pixels(mean: tuple[float, ...], std: tuple[float, ...], side: int) -> nn.Module:
    return nn.Sequential(CentreCrop(side), PixelNormalize(mean, std))


def _wide_resnet(
    depth: int,
    width: int,
    dropout: float,
    stem: Stem,
    pixels: Callable[[], nn.Module],
    num_classes: int,
) -> nn.Module:
    return WideResNet(depth, width, num_classes, pixels(), dropout, stem)


def _other(
    make: Callable[..., nn.Module], pixels: Callable[[], nn.Module], num_classes: int
) -> nn.Module:
    return make(num_classes=num_classes, pixels=pixels())
