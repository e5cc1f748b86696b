"""Random crops and flips of a whole batch at once.

Nothing here waits for the device or reads what was drawn, so all of it can be part of a CUDA graph.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

_TRIES = 10
"""As many boxes torchvision draws before it takes the largest."""

_SCALE = (0.08, 1.0)
"""Smallest and largest share of the image's area that a box has, torchvision's default."""

_RATIO = (3 / 4, 4 / 3)
"""Smallest and largest width of a box divided by its height, torchvision's default."""


def random_crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Return images of the same size, each cut out at random and mirrored with chance 1/2.

    Parameters
    ----------
    images : torch.Tensor
        NCHW, of any number type, on any device.
    generator : torch.Generator
        On the same device; the only source of random numbers.
    padding : int (default: 4)
        Black pixels that are added on each side before cutting.

    Returns
    -------
    torch.Tensor
        A new contiguous tensor of the same type.
    """
    count, channels, height, width = images.shape
    device = images.device
    top, left = torch.randint(
        0, 2 * padding + 1, (2, count, 1), generator=generator, device=device
    ).unbind()
    mirrored = torch.randint(0, 2, (count, 1), generator=generator, device=device)
    numbers = torch.arange(max(width, height), device=device)
    # |c - (width - 1)| is column c counted from the other side.
    columns = torch.add(numbers[:width], mirrored, alpha=1 - width).abs_().add_(left)
    rows = numbers[:height] + top
    padded = functional.pad(images, (padding,) * 4)
    # One gather for crop and flip: on a CPU several times as fast as indexing.
    pixels = torch.add(columns[:, None, :], rows[:, :, None], alpha=padded.shape[3])
    pixels = pixels.flatten(1)[:, None].expand(-1, channels, -1)
    return padded.flatten(2).gather(2, pixels).view(count, channels, height, width)


def random_resized_crop_and_flip(images: Tensor, generator: torch.Generator, side: int) -> Tensor:
    """Return squares, each made of a random box of its image and mirrored with chance 1/2.

    The boxes are those of torchvision's ``RandomResizedCrop``, see `random_boxes`. Values between
    pixels are interpolated bilinearly. Nothing is averaged where a box shrinks, so images should
    not be much larger than `side`.

    Parameters
    ----------
    images : torch.Tensor
        NCHW, of any number type, on any device.
    generator : torch.Generator
        On the same device; the only source of random numbers.
    side : int
        Of the squares, in pixels.

    Returns
    -------
    torch.Tensor
        Of shape (N, C, side, side) and the same type, whole numbers rounded.
    """
    count, _, height, width = images.shape
    top, left, rows, columns = random_boxes(count, height, width, generator)
    mirrored = torch.randint(0, 2, (count, 1), generator=generator, device=images.device)
    centres = (torch.arange(side, dtype=torch.float32, device=images.device) + 0.5) / side
    # |m - c| is centre c counted from the other side where m is 1.
    x = _grid_positions(left, columns, torch.abs(mirrored - centres), width)
    y = _grid_positions(top, rows, centres, height)
    shape = (count, side, side)
    grid = torch.stack((x[:, None, :].expand(shape), y[:, :, None].expand(shape)), dim=3)
    floats = images if images.dtype == torch.float64 else images.float()
    cut = functional.grid_sample(
        floats, grid.to(floats.dtype), padding_mode="border", align_corners=False
    )
    return (cut if images.is_floating_point() else cut.round_()).to(images.dtype)


def random_boxes(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Return boxes within an image, drawn as torchvision's ``RandomResizedCrop`` does.

    The share of the area is drawn uniformly, the ratio of the sides log-uniformly, up to ten
    times until the box fits; then its position, uniformly. A box that never fits is the largest of
    an allowed ratio; torchvision puts that one in the middle, here it is anywhere as well.

    Parameters
    ----------
    count : int
        How many boxes.
    height, width : int
        Of the image, in pixels.
    generator : torch.Generator
        The boxes are made on its device.

    Returns
    -------
    torch.Tensor
        Top, left, height and width in whole pixels, float32 of shape (4, count).
    """
    draws = torch.rand(
        (2 * _TRIES + 2, count), generator=generator, device=generator.device, dtype=torch.float32
    )
    area_draws, ratio_draws, positions = torch.split(draws, [_TRIES, _TRIES, 2])
    areas = height * width * (_SCALE[0] + (_SCALE[1] - _SCALE[0]) * area_draws)
    low, high = math.log(_RATIO[0]), math.log(_RATIO[1])
    ratios = torch.exp(low + (high - low) * ratio_draws)
    sizes = torch.stack((torch.sqrt(areas / ratios), torch.sqrt(areas * ratios))).round_()
    heights, widths = sizes.unbind()
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    # One try more, which always fits.
    last_height = min(height, max(1, round(width / _RATIO[0])))
    last_width = min(width, max(1, round(height * _RATIO[1])))
    heights = functional.pad(heights, (0, 0, 0, 1), value=last_height)
    widths = functional.pad(widths, (0, 0, 0, 1), value=last_width)
    chosen = functional.pad(fits.int(), (0, 0, 0, 1), value=1).argmax(dim=0, keepdim=True)
    rows, columns = heights.gather(0, chosen)[0], widths.gather(0, chosen)[0]
    top = torch.floor(positions[0] * (height - rows + 1))
    left = torch.floor(positions[1] * (width - columns + 1))
    return torch.stack((top, left, rows, columns))


def _grid_positions(first: Tensor, size: Tensor, centres: Tensor, whole: int) -> Tensor:
    """Return where to sample along one axis, in [-1, 1], of shape (count, side); inside the box."""
    first, size = first[:, None], size[:, None]
    pixels = torch.clamp(first + size * centres - 0.5, first, first + size - 1)
    return (2 * pixels + 1) / whole - 1
