"""What the steps are measured with: models, made-up data of their shape, and batch sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_blsgd.models.pixels import CIFAR10_MEAN, CIFAR10_STD, PixelNormalize
from flower_blsgd.models.resnet import resnet20
from flower_blsgd.models.torchvision_ops import import_torchvision
from flower_blsgd.tasks.augmentation import random_crop_and_flip

from .rows import missing

Data = tuple[Tensor, Tensor]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
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
    cpu, cuda : tuple of int
        Batch size and steps per turn: on a CPU few, so that a row ends.
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
    cpu: tuple[int, int]
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


class WideResNet(nn.Module):
    """WRN-depth-width of Zagoruyko and Komodakis 2016, for bytes of 32x32 in NCHW.

    Parameters
    ----------
    depth : int
        6 n + 4: 16, 28.
    width : int
        Times the channels of a ResNet.
    """

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.normalize = PixelNormalize(CIFAR10_MEAN, CIFAR10_STD)
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        widths = [16, 16 * width, 32 * width, 64 * width]
        blocks = [
            _WideBlock(
                widths[group] if block == 0 else widths[group + 1],
                widths[group + 1],
                2 if group and block == 0 else 1,
            )
            for group in range(3)
            for block in range((depth - 4) // 6)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(widths[-1])
        self.linear = nn.Linear(widths[-1], CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits."""
        out = self.blocks(self.conv1(self.normalize(pixels)))
        logits: Tensor = self.linear(functional.relu(self.norm(out)).mean(dim=(2, 3)))
        return logits


class _WideBlock(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        same = width_in == width and stride == 1
        self.shortcut = None if same else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out = functional.relu(self.norm1(inputs))
        beside = inputs if self.shortcut is None else self.shortcut(out)
        sum_: Tensor = beside + self.conv2(functional.relu(self.norm2(self.conv1(out))))
        return sum_


def vit_b_16() -> nn.Module:
    """Return torchvision's, with fresh weights, for bytes of 224x224 in NCHW."""
    torchvision = import_torchvision()
    transformer: nn.Module = torchvision.models.vit_b_16(weights=None, num_classes=CLASSES)
    return nn.Sequential(PixelNormalize(IMAGENET_MEAN, IMAGENET_STD), transformer)


class DistilBert(nn.Module):
    """The classifier of transformers, with fresh weights; word numbers in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        if not missing("torchvision", "vision"):  # transformers imports it where it is installed
            import_torchvision()
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        settings = DistilBertConfig(vocab_size=WORDS, num_labels=CLASSES)
        self.inner = DistilBertForSequenceClassification(settings)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.inner(input_ids=words).logits
        return logits


RESNET20 = Workload(
    "ResNet20",
    resnet20,
    lambda count: images(32, count),
    "images",
    cpu=(32, 32),
    cuda=(32, 64),
    augment=random_crop_and_flip,
)
WRN_16_8 = Workload(
    "WRN-16-8",
    lambda: WideResNet(16, 8),
    lambda count: images(32, count),
    "images",
    cpu=(8, 8),
    cuda=(128, 32),
    augment=random_crop_and_flip,
)
WRN_28_10 = Workload(
    "WRN-28-10",
    lambda: WideResNet(28, 10),
    lambda count: images(32, count),
    "images",
    cpu=(4, 6),
    cuda=(128, 16),
    augment=random_crop_and_flip,
)
VIT_B_16 = Workload(
    "ViT-B/16",
    vit_b_16,
    lambda count: images(224, count),
    "images",
    cpu=(2, 4),
    cuda=(64, 16),
    optimizer="adamw",
    package="torchvision",
    extra="vision",
)
DISTILBERT = Workload(
    "DistilBERT",
    DistilBert,
    sequences,
    "sequences",
    cpu=(4, 4),
    cuda=(32, 16),
    optimizer="adamw",
    package="transformers",
    extra="text",
)
