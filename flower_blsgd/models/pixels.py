"""What the models of images do first: stored bytes become normalised numbers of a given size."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
CIFAR100_MEAN = (0.5071, 0.4865, 0.4409)
CIFAR100_STD = (0.2673, 0.2564, 0.2762)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class PixelNormalize(nn.Module):
    """Turns images of 0 to 255 into normalised floats, so that they can be kept as bytes.

    Parameters
    ----------
    mean, std : sequence of float
        Of each channel, for values in [0, 1].
    """

    mean: Tensor
    inverse_std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Not persistent: the state dict stays that of the plain network.
        for name, values in (
            ("mean", torch.tensor(mean) * 255),
            ("inverse_std", 1 / (torch.tensor(std) * 255)),
        ):
            self.register_buffer(name, values.view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return (images / 255 - mean) / std, in the type of the buffers."""
        return (images.to(self.mean.dtype) - self.mean) * self.inverse_std


class CentreCrop(nn.Module):
    """Cuts the middle out of images that are larger than a square; smaller sides stay.

    Parameters
    ----------
    side : int
        Of the square, in pixels.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, images: Tensor) -> Tensor:
        """Return a view; of images of that side these themselves."""
        for dimension in (-2, -1):
            over = images.shape[dimension] - self.side
            if over > 0:
                images = images.narrow(dimension, over // 2, self.side)
        return images


class Resize(nn.Module):
    """Brings images of any size to a square by bilinear interpolation, on their device.

    Where it shrinks a side it averages over all pixels that fall into one (antialiasing), as
    PIL does.

    Parameters
    ----------
    side : int
        Of the square, in pixels.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, images: Tensor) -> Tensor:
        """Return images of floats in that size; those that have it are themselves returned."""
        height, width = images.shape[-2:]
        if height == width == self.side:
            return images
        return functional.interpolate(
            images,
            size=(self.side, self.side),
            mode="bilinear",
            antialias=max(height, width) > self.side,
        )
