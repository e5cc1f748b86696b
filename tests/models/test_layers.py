"""What several models do first, with pixels and with tokens."""

import torch
from torch import Tensor

from flower_blsgd.models.layers import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    CentreCrop,
    PixelNormalize,
    Resize,
    without_empty_columns,
)

TOKENS = torch.tensor([[5, 6, -1, -1], [7, 0, 8, -1]], dtype=torch.int32)


def numbered(height: int, width: int) -> Tensor:
    return torch.arange(height * width, dtype=torch.float32).view(1, 1, height, width)


def test_normalize_by_hand() -> None:
    layer = PixelNormalize((0.2, 0.4), (0.5, 0.25))
    pixels = torch.tensor([[[[0, 51]], [[102, 255]]]], dtype=torch.uint8)
    expected = torch.tensor([[[[-0.4, 0.0]], [[0.0, 2.4]]]])
    assert torch.allclose(layer(pixels), expected, atol=1e-6)
    assert torch.allclose(layer(pixels.float()), expected, atol=1e-6)
    assert layer.half()(pixels).dtype == torch.float16
    assert not layer.state_dict()
    average = torch.tensor(CIFAR10_MEAN).view(1, 3, 1, 1) * 255
    assert float(PixelNormalize(CIFAR10_MEAN, CIFAR10_STD)(average).abs().max()) < 1e-6


def test_centre_crop() -> None:
    assert CentreCrop(2)(numbered(4, 5)).tolist() == [[[[6.0, 7.0], [11.0, 12.0]]]]
    assert CentreCrop(3)(numbered(4, 5)).shape == (1, 1, 3, 3)
    assert CentreCrop(3)(numbered(2, 5)).tolist() == [[[[1, 2, 3], [6, 7, 8]]]]
    images = numbered(4, 4)
    assert CentreCrop(4)(images) is images
    assert CentreCrop(9)(images) is images


def test_resize_by_hand() -> None:
    row = torch.tensor([[[[0.0, 4.0], [0.0, 4.0]]]])
    expected = torch.tensor([0.0, 1.0, 3.0, 4.0]).expand(1, 1, 4, 4)
    assert torch.allclose(Resize(4)(row), expected)
    assert torch.allclose(Resize(1)(row), torch.tensor(2.0).view(1, 1, 1, 1))  # averages
    images = numbered(5, 5)
    assert Resize(5)(images) is images
    assert Resize(5)(numbered(5, 4)).shape == (1, 1, 5, 5)


def test_texts_as_wide_as_the_longest() -> None:
    cut = without_empty_columns(TOKENS)
    assert cut.tolist() == [[5, 6, -1], [7, 0, 8]]
    assert cut.data_ptr() == TOKENS.data_ptr()
    assert without_empty_columns(cut).shape == (2, 3)
    assert without_empty_columns(torch.full((2, 3), -1)).tolist() == [[-1], [-1]]
