"""The small ResNets for 32x32 images of He et al. 2016, section 4.2."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from .layers import CIFAR10_MEAN, CIFAR10_STD, PixelNormalize

Shortcut = Literal["A", "B"]


def resnet20(
    num_classes: int = 10, shortcut: Shortcut = "A", pixels: nn.Module | None = None
) -> nn.Module:
    """Return ResNet20; for ten classes 269,722 parameters, with shortcut B 272,474."""
    return CifarResNet(3, num_classes, shortcut, pixels)


def resnet8(
    num_classes: int = 10, shortcut: Shortcut = "A", pixels: nn.Module | None = None
) -> nn.Module:
    """Return the same with one block per stage; for ten classes 75,290 parameters."""
    return CifarResNet(1, num_classes, shortcut, pixels)


class CifarResNet(nn.Module):
    """ResNet of 6 n + 2 layers for images of any small size, bytes in NCHW.

    Parameters
    ----------
    blocks : int
        n, the blocks of each of the three stages.
    num_classes : int
        Outputs.
    shortcut : "A" or "B"
        Where the width changes: every second pixel and zeros for the new channels (A, without
        parameters, the paper's choice for CIFAR-10), or a 1x1 convolution (B).
    pixels : torch.nn.Module, optional
        Makes normalised floats of the bytes; by default with mean and deviation of CIFAR-10.
    """

    def __init__(
        self,
        blocks: int,
        num_classes: int,
        shortcut: Shortcut,
        pixels: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if pixels is None:
            pixels = PixelNormalize(CIFAR10_MEAN, CIFAR10_STD)
        self.normalize = pixels
        self.conv1 = _conv3x3(3, 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, shortcut)
        self.layer2 = _stage(16, 32, blocks, shortcut)
        self.layer3 = _stage(32, 64, blocks, shortcut)
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


class _Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = _conv3x3(width_in, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if width != width_in and shortcut == "A":
            self.shortcut = _SubsampleAndPad(width - width_in, stride)
        elif width != width_in:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

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


def _stage(width_in: int, width: int, blocks: int, shortcut: Shortcut) -> nn.Sequential:
    stride = 1 if width == width_in else 2
    first = _Block(width_in, width, stride, shortcut)
    return nn.Sequential(first, *(_Block(width, width, 1, shortcut) for _ in range(blocks - 1)))


def _conv3x3(width_in: int, width: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
