"""What several models do first: stored bytes become normalised pixels, texts lose their padding."""

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
    """Normalise images of 0 to 255, so that they can be kept as bytes.

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
    """Cut the middle out of images that are larger than a square; smaller sides stay.

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
    """Resize images of any size to a square by bilinear interpolation, on their device.

    A side that shrinks is antialiased, as PIL does.

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


def without_empty_columns(tokens: Tensor) -> Tensor:
    """Return a batch of texts as wide as its longest text.

    The logits do not change by it, only the time. The batch stays as wide as it is where no value
    may be read: while a CUDA graph is captured or torch.compile traces (so that one capture serves
    all batches), and where torch forbids to wait for the GPU.

    Parameters
    ----------
    tokens : torch.Tensor
        Integers of shape (batch_size, width), -1 behind the end of each text.

    Returns
    -------
    torch.Tensor
        A view of shape (batch_size, longest), at least one column.
    """
    if torch.compiler.is_compiling():
        return tokens
    if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
        return tokens
    try:
        longest = int((tokens >= 0).any(dim=0).sum())
    except RuntimeError:
        return tokens
    return tokens[:, : max(longest, 1)]
