"""ResNets for small uint8 images, and wide ResNets; torchvision has neither."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import UsageError

Channels = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, for values in [0, 1]."""

CIFAR10_CHANNELS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR100_CHANNELS = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
IMAGENET_CHANNELS: Channels = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Stem = Literal["3x3", "7x7"]

_WIDE_NAME = re.compile(r"wrn-([1-9]\d{0,3})-([1-9]\d{0,2})")


class PixelNormalize(nn.Module):
    """Normalization layer for images with values from 0 to 255.

    `mean` and `std` are per channel, for values in [0, 1].
    """

    mean: Tensor
    inverse_std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Not persistent, so that the state dict is that of the plain network.
        pixels = [torch.tensor(values).view(1, -1, 1, 1) * 255 for values in (mean, std)]
        self.register_buffer("mean", pixels[0], persistent=False)
        self.register_buffer("inverse_std", 1 / pixels[1], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return (images / 255 - mean) / std, in the type of the buffers."""
        return (images.to(self.mean.dtype) - self.mean) * self.inverse_std


class CifarResNet(nn.Module):
    """ResNet with 6 n + 2 layers for small uint8 images in NCHW.

    Source: He et al. 2016, section 4.2, with shortcut A: where the width changes, every second
    pixel and zeros for the new channels. `blocks` is n, the number of blocks in each of the three
    stages. `pixels` normalizes the images, by default with the statistics of CIFAR-10.
    """

    def __init__(self, blocks: int, num_classes: int = 10, pixels: nn.Module | None = None) -> None:
        super().__init__()
        self.normalize = pixels or PixelNormalize(*CIFAR10_CHANNELS)
        self.conv1 = _conv3x3(3, 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(_Block, 16, 16, 1, blocks)
        self.layer2 = _stage(_Block, 16, 32, 2, blocks)
        self.layer3 = _stage(_Block, 32, 64, 2, blocks)
        self.linear = nn.Linear(64, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        out = functional.relu(self.bn1(self.conv1(self.normalize(images))))
        out = self.layer3(self.layer2(self.layer1(out)))
        logits: Tensor = self.linear(out.mean(dim=(2, 3)))
        return logits


resnet20 = functools.partial(CifarResNet, 3)
"""ResNet20; 269,722 parameters for ten classes."""

resnet8 = functools.partial(CifarResNet, 1)
"""ResNet8; 75,290 parameters for ten classes."""


class _Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(width_in, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if width != width_in:
            self.shortcut = _SubsampleAndPad(width - width_in, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(inputs)))
        out = self.bn2(self.conv2(out)) + self.shortcut(inputs)
        return functional.relu(out)


class _SubsampleAndPad(nn.Module):
    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self._pad = (0, 0, 0, 0, new_channels // 2, new_channels - new_channels // 2)
        self._stride = stride

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.pad(inputs[:, :, :: self._stride, :: self._stride], self._pad)


def depth_and_width(name: str) -> tuple[int, int]:
    """Return depth and width from the name of a wide ResNet, such as ``"wrn-28-10"``."""
    match = _WIDE_NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"model = {name!r} must be wrn-DEPTH-WIDTH, such as wrn-28-10")
    depth, width = int(match[1]), int(match[2])
    if depth < 10 or depth % 6 != 4:
        raise UsageError(
            f"model = {name!r}: the depth must be 6 n + 4, which {depth} is not; such as 10, 16, "
            "22 or 28"
        )
    return depth, width


class WideResNet(nn.Module):
    """WRN-depth-width of Zagoruyko and Komodakis 2016, as in the authors' code, for uint8 images.

    The paper uses images of 32x32. For images of 224x224 (`stem` "7x7"), the first layer is that of
    the ResNets for ImageNet: a 7x7 convolution and max pooling, each with stride 2, so that the
    first stage works on 56x56. The stem has no BatchNorm or ReLU, because the first block begins
    with them.

    `depth` is 6 n + 4, with n blocks in each of the three stages, and `width` a factor for the
    channels of a ResNet (16, 32 and 64). `pixels` normalizes the images. `dropout` is the rate
    between the two convolutions of a block.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        num_classes: int,
        pixels: nn.Module,
        dropout: float = 0.0,
        stem: Stem = "3x3",
    ) -> None:
        super().__init__()
        self.pixels = pixels
        self.stem: nn.Module = _conv3x3(3, 16)
        if stem == "7x7":
            self.stem = nn.Sequential(
                nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False),
                nn.MaxPool2d(3, stride=2, padding=1),
            )
        blocks = (depth - 4) // 6
        self.stage1 = _stage(_WideBlock, 16, 16 * width, 1, blocks, dropout)
        self.stage2 = _stage(_WideBlock, 16 * width, 32 * width, 2, blocks, dropout)
        self.stage3 = _stage(_WideBlock, 32 * width, 64 * width, 2, blocks, dropout)
        self.bn = nn.BatchNorm2d(64 * width)
        self.linear = nn.Linear(64 * width, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                # He initialization over outputs, as in the authors' code.
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        out = self.stem(self.pixels(images))
        out = self.stage3(self.stage2(self.stage1(out)))
        logits: Tensor = self.linear(functional.relu(self.bn(out)).mean(dim=(2, 3)))
        return logits


class _WideBlock(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = _conv3x3(width_in, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = _conv3x3(width, width)
        self.shortcut = None
        if width != width_in:
            self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        active = functional.relu(self.bn1(inputs))
        out = self.dropout(functional.relu(self.bn2(self.conv1(active))))
        # A projection shortcut uses the activated input, an identity shortcut the original one.
        skipped = inputs if self.shortcut is None else self.shortcut(active)
        added: Tensor = self.conv2(out) + skipped
        return added


def _conv3x3(width_in: int, width: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)


def _stage(
    block: Callable[..., nn.Module],
    width_in: int,
    width: int,
    stride: int,
    blocks: int,
    *dropout: float,
) -> nn.Sequential:
    first = block(width_in, width, stride, *dropout)
    return nn.Sequential(first, *(block(width, width, 1, *dropout) for _ in range(1, blocks)))
