"""Random crops and flips of a whole batch at once.

Nothing here waits for the device or asks what was drawn, so all of it can be part of a CUDA graph.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional


def random_crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Return images of the same size, each cut out at random and mirrored with chance 1/2.

    Parameters
    ----------
    images : torch.Tensor
        NCHW, of any number type, on any device.
    generator : torch.Generator
        On the same device; the only source of random numbers.
    padding : int (default: 4)
        Black pixels that are thought on each side before cutting.

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
    places = torch.arange(max(width, height), device=device)
    # |c - (width - 1)| is column c counted from the other side.
    columns = torch.add(places[:width], mirrored, alpha=1 - width).abs_().add_(left)
    rows = places[:height] + top
    padded = functional.pad(images, (padding,) * 4)
    # One gather for crop and flip: on a CPU several times as fast as indexing.
    places = torch.add(columns[:, None, :], rows[:, :, None], alpha=padded.shape[3])
    places = places.flatten(1)[:, None].expand(-1, channels, -1)
    return padded.flatten(2).gather(2, places).view(count, channels, height, width)


_TRIES = 10


def random_resized_crop_and_flip(
    images: Tensor,
    generator: torch.Generator,
    side: int,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
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
    scale, ratio : pair of float
        See `random_boxes`.

    Returns
    -------
    torch.Tensor
        Of shape (N, C, side, side) and the same type, whole numbers rounded.
    """
    count, _, height, width = images.shape
    top, left, rows, columns = random_boxes(count, height, width, generator, scale, ratio)
    mirrored = torch.randint(0, 2, (count, 1), generator=generator, device=images.device)
    centres = (torch.arange(side, dtype=torch.float32, device=images.device) + 0.5) / side
    # |m - c| is centre c counted from the other side where m is 1.
    x = _places(left, columns, torch.abs(mirrored - centres), width)
    y = _places(top, rows, centres, height)
    shape = (count, side, side)
    grid = torch.stack((x[:, None, :].expand(shape), y[:, :, None].expand(shape)), dim=3)
    floats = images if images.dtype == torch.float64 else images.float()
    cut = functional.grid_sample(
        floats, grid.to(floats.dtype), padding_mode="border", align_corners=False
    )
    return (cut if images.is_floating_point() else cut.round_()).to(images.dtype)


def random_boxes(
    count: int,
    height: int,
    width: int,
    generator: torch.Generator,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Return boxes within an image, drawn as torchvision's ``RandomResizedCrop`` does.

    The share of the area is drawn uniformly, the ratio of the sides log-uniformly, up to ten
    times until the box fits; then its place, uniformly. A box that never fits is the largest of
    an allowed ratio; torchvision puts that one in the middle, here it is anywhere as well.

    Parameters
    ----------
    count : int
        How many boxes.
    height, width : int
        Of the image, in pixels.
    generator : torch.Generator
        The boxes are made on its device.
    scale : pair of float
        Smallest and largest share of the image's area.
    ratio : pair of float
        Smallest and largest width divided by height.

    Returns
    -------
    torch.Tensor
        Top, left, height and width in whole pixels, float32 of shape (4, count).
    """
    draws = torch.rand(
        (2 * _TRIES + 2, count), generator=generator, device=generator.device, dtype=torch.float32
    )
    area_draws, ratio_draws, places = torch.split(draws, [_TRIES, _TRIES, 2])
    areas = height * width * (scale[0] + (scale[1] - scale[0]) * area_draws)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratios = torch.exp(low + (high - low) * ratio_draws)
    sizes = torch.stack((torch.sqrt(areas / ratios), torch.sqrt(areas * ratios))).round_()
    heights, widths = sizes.unbind()
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    # One try more, which always fits.
    last_height = min(height, max(1, round(width / ratio[0])))
    last_width = min(width, max(1, round(height * ratio[1])))
    heights = functional.pad(heights, (0, 0, 0, 1), value=last_height)
    widths = functional.pad(widths, (0, 0, 0, 1), value=last_width)
    chosen = functional.pad(fits.int(), (0, 0, 0, 1), value=1).argmax(dim=0, keepdim=True)
    rows, columns = heights.gather(0, chosen)[0], widths.gather(0, chosen)[0]
    top = torch.floor(places[0] * (height - rows + 1))
    left = torch.floor(places[1] * (width - columns + 1))
    return torch.stack((top, left, rows, columns))


def _places(first: Tensor, size: Tensor, centres: Tensor, whole: int) -> Tensor:
    """Return where to look in [-1, 1], of shape (count, side); never beside the box."""
    first, size = first[:, None], size[:, None]
    pixels = torch.clamp(first + size * centres - 0.5, first, first + size - 1)
    return (2 * pixels + 1) / whole - 1
