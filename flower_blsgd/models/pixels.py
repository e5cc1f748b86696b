"""What the models of images do first: stored bytes become normalised numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)


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
