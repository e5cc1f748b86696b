"""Random crops and flips of a whole batch."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flower_blsgd.tasks.images import (
    random_boxes,
    random_crop_and_flip,
    random_resized_crop_and_flip,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def images_of(count: int, dtype: torch.dtype = torch.uint8, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (count, 3, 10, 12)
    return torch.randint(1, 256, shape, generator=generator).to(device, dtype)


def generator_of(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def one_by_one(images: Tensor, generator: torch.Generator, padding: int) -> Tensor:
    """Return the same for one image after the other, from the same random numbers."""
    count, _, height, width = images.shape
    draw = {"generator": generator, "device": images.device}
    tops, lefts = torch.randint(0, 2 * padding + 1, (2, count, 1), **draw)
    mirrored = torch.randint(0, 2, (count, 1), **draw)
    changed = []
    for image, top, left, mirror in zip(
        images, tops.flatten().tolist(), lefts.flatten().tolist(), mirrored, strict=True
    ):
        canvas = image.new_zeros(3, height + 2 * padding, width + 2 * padding)
        canvas[:, padding : padding + height, padding : padding + width] = image
        cut = canvas[:, top : top + height, left : left + width]
        changed.append(cut.flip(2) if mirror else cut)
    return torch.stack(changed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("padding", [0, 4])
def test_equals_one_by_one(device: str, dtype: torch.dtype, padding: int) -> None:
    images = images_of(50, dtype, device)
    before, state = images.clone(), torch.get_rng_state()
    changed = random_crop_and_flip(images, generator_of(3, device), padding)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(changed, one_by_one(images, generator_of(3, device), padding))
    assert changed.dtype == dtype
    assert changed.device == images.device
    assert changed.is_contiguous()
    assert torch.equal(images, before)


# random boxes


def one_box(draws: list[float], height: int, width: int) -> tuple[int, ...]:
    """Return a box as torchvision's RandomResizedCrop makes it of random numbers."""
    down, right = draws[20:]
    for share, power in zip(draws[:10], draws[10:20], strict=True):
        area = height * width * (0.08 + 0.92 * share)
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * power)
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < rows <= height and 0 < columns <= width:
            break
    else:  # the largest of an allowed ratio
        rows, columns = (height, round(height * 4 / 3)) if width > height else (width, height)
    top, left = (int(down * (height - rows + 1)), int(right * (width - columns + 1)))
    return top, left, rows, columns


@pytest.mark.parametrize(("height", "width"), [(256, 256), (20, 300)])
def test_boxes_equal_one_by_one(height: int, width: int) -> None:
    """Also where boxes do not fit, and are drawn again; of a wide image most never fit."""
    count = 2000
    draws = torch.rand((22, count), generator=generator_of(4)).T.tolist()
    expected = torch.tensor([one_box(numbers, height, width) for numbers in draws])
    found = random_boxes(count, height, width, generator_of(4)).T
    assert torch.equal(found, found.round())
    assert float((found == expected).double().mean()) > 0.999  # but for rounding to float32
    top, left, rows, columns = found.T
    assert (float(top.min()), float((top + rows).max())) == (0, height)
    assert (float(left.min()), float((left + columns).max())) == (0, width)


def coarse_images(count: int, height: int, width: int) -> Tensor:
    coarse = torch.rand(count, 3, 7, 7, generator=generator_of(9)) * 255
    return functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 255)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_resized_crops_equal_one_by_one(device: str, dtype: torch.dtype) -> None:
    count, side = 30, 24
    images = coarse_images(count, 32, 40).to(device, dtype)
    before, state = images.clone(), torch.get_rng_state()
    changed = random_resized_crop_and_flip(images, generator_of(3, device), side)
    assert torch.equal(torch.get_rng_state(), state)
    assert (changed.shape, changed.dtype) == ((count, 3, side, side), dtype)
    assert torch.equal(images, before)
    generator = generator_of(3, device)
    boxes = random_boxes(count, 32, 40, generator).long().T.tolist()
    mirrored = torch.randint(0, 2, (count, 1), generator=generator, device=device)
    for image, ours, (top, left, rows, columns), mirror in zip(
        images, changed, boxes, mirrored, strict=True
    ):
        cut = image[None, :, top : top + rows, left : left + columns].double()
        expected = functional.interpolate(cut, size=(side, side), mode="bilinear")[0]
        expected = expected.flip(2) if mirror else expected
        furthest = float((ours.double() - expected).abs().max())
        assert furthest < (0.502 if dtype == torch.uint8 else 0.002)


def test_resized_crop_sees_nothing_beside_its_box() -> None:
    """The last row and column of a box are not mixed with what lies behind them.

    Black and white stay what they are.
    """
    generator = generator_of(6)
    top, left, rows, columns = random_boxes(1, 64, 64, generator_of(6))[:, 0].int().tolist()
    image = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    image[:, :, top : top + rows, left : left + columns] = 200
    assert (rows, columns) != (64, 64)
    changed = random_resized_crop_and_flip(image, generator, 224)
    assert set(changed.flatten().tolist()) == {200}
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 50, 50)
    changed = random_resized_crop_and_flip(images, generator_of(0), 224)
    assert not changed[0].any()
    assert bool((changed[1] == 255).all())
