"""Wide ResNets of Zagoruyko and Komodakis 2016, as in the authors' code.

The paper has them for images of 32x32. For images of 224x224 (`Stem` "7x7") the first layer is
that of the ResNets for ImageNet: a 7x7 convolution and max pooling, each with stride 2, after
which the first stage works on 56x56 as theirs does. Nothing else changes; the first block begins
with BatchNorm and ReLU, so the stem has none of its own.
"""

import re
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from ..errors import UsageError

Stem = Literal["3x3", "7x7"]

_FORM = "wrn-DEPTH-WIDTH"
_NAME = re.compile(r"wrn-([1-9]\d{0,3})-([1-9]\d{0,2})")


def is_wide_resnet(name: str) -> bool:
    """Return whether a model's name means one of these, though perhaps an impossible one."""
    return name == "wrn" or name.startswith("wrn-")


def depth_and_width(name: str) -> tuple[int, int]:
    """Return what a name such as ``"wrn-28-10"`` says.

    Raises
    ------
    UsageError
        If it is no such name, or the depth is not 6 n + 4.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"model = {name!r} must be {_FORM}, such as wrn-28-10")
    depth, width = int(match[1]), int(match[2])
    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1:
        raise UsageError(
            f"model = {name!r}: the depth must be 6 n + 4, which {depth} is not; such as 10, 16, "
            "22 or 28"
        )
    return depth, width


class WideResNet(nn.Module):
    """WRN-depth-width, for bytes in NCHW.

    Parameters
    ----------
    depth : int
        6 n + 4, with n blocks in each of the three stages.
    width : int
        Times the channels of a ResNet: 16, 32 and 64.
    num_classes : int
        Outputs.
    pixels : torch.nn.Module
        Makes normalised floats of the bytes.
    dropout : float (default: 0.0)
        Share of the values that are dropped between the two convolutions of a block.
    stem : {"3x3", "7x7"} (default: "3x3")
        The first layer: for small images, or for those of 224x224.
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
        self.stem: nn.Module = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        if stem == "7x7":
            self.stem = nn.Sequential(
                nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False),
                nn.MaxPool2d(3, stride=2, padding=1),
            )
        blocks = (depth - 4) // 6
        self.stage1 = _stage(16, 16 * width, blocks, 1, dropout)
        self.stage2 = _stage(16 * width, 32 * width, blocks, 2, dropout)
        self.stage3 = _stage(32 * width, 64 * width, blocks, 2, dropout)
        self.bn = nn.BatchNorm2d(64 * width)
        self.linear = nn.Linear(64 * width, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):  # He's, over outputs as the authors have it
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        out = self.stem(self.pixels(images))
        out = self.stage3(self.stage2(self.stage1(out)))
        logits: Tensor = self.linear(functional.relu(self.bn(out)).mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = None
        if width != width_in:
            self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        active = functional.relu(self.bn1(inputs))
        out = self.dropout(functional.relu(self.bn2(self.conv1(active))))
        # A new shape is made of the activated input, an old one kept as it came.
        beside = inputs if self.shortcut is None else self.shortcut(active)
        added: Tensor = self.conv2(out) + beside
        return added


def _stage(width_in: int, width: int, blocks: int, stride: int, dropout: float) -> nn.Sequential:
    first = _Block(width_in, width, stride, dropout)
    return nn.Sequential(first, *(_Block(width, width, 1, dropout) for _ in range(1, blocks)))
