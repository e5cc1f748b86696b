"""What the steps are measured with: models, made-up data of their shape, and batch sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flower_blsgd.models.pretrained import import_transformers
from flower_blsgd.models.resnets import (
    CIFAR100_CHANNELS,
    PixelNormalize,
    WideResNet,
    depth_and_width,
    resnet20,
)
from flower_blsgd.tasks.images import random_crop_and_flip

from .rows import missing

Data = tuple[Tensor, Tensor]

WORDS, CLASSES = 30_522, 10


@dataclass(frozen=True)
class Workload:
    """A model to train, and how much of it at a time.

    Parameters
    ----------
    name : str
        As rows call it.
    model : callable
        Makes a fresh one.
    data : callable
        Returns so many inputs and targets.
    item : str
        What a sample is, in the plural.
    cuda : tuple of int
        Batch size and steps per turn on a GPU.
    optimizer : {"sgd", "adamw"}
        What it is trained with.
    augment : callable, optional
        As of `LocalSGD`.
    package, extra : str
        What must be installed, and the extra of ours that does.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Data]
    item: str
    cuda: tuple[int, int]
    optimizer: str = "sgd"
    augment: Callable[..., Any] | None = None
    package: str = "torch"
    extra: str = ""

    @property
    def obstacle(self) -> str | None:
        """Why it cannot be measured here; None if it can."""
        return missing(self.package, self.extra)


def images(side: int, count: int) -> Data:
    """Return images as bytes in NCHW, and labels."""
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    return pixels, torch.randint(0, CLASSES, (count,))


def sequences(count: int, words: int = 128) -> Data:
    """Return sequences of word numbers, and labels."""
    return torch.randint(0, WORDS, (count, words)), torch.randint(0, CLASSES, (count,))


def wide_resnet(name: str) -> nn.Module:
    """Return one by name, for bytes of 32x32 in NCHW."""
    pixels = PixelNormalize(*CIFAR100_CHANNELS)
    return WideResNet(*depth_and_width(name), CLASSES, pixels)


class DistilBert(nn.Module):
    """The classifier of transformers, with fresh weights; word numbers in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        transformers = import_transformers("distilbert")
        settings = transformers.DistilBertConfig(vocab_size=WORDS, num_labels=CLASSES)
        self.inner = transformers.DistilBertForSequenceClassification(settings)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.inner(input_ids=words).logits
        return logits


RESNET20 = Workload(
    "ResNet20",
    resnet20,
    lambda count: images(32, count),
    "images",
    cuda=(32, 64),
    augment=random_crop_and_flip,
)
WRN_16_8 = Workload(
    "WRN-16-8",
    lambda: wide_resnet("wrn-16-8"),
    lambda count: images(32, count),
    "images",
    cuda=(128, 32),
    augment=random_crop_and_flip,
)
DISTILBERT = Workload(
    "DistilBERT",
    DistilBert,
    sequences,
    "sequences",
    cuda=(32, 16),
    optimizer="adamw",
    package="transformers",
    extra="text",
)
