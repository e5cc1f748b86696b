"""Random crops and flips of a whole batch."""

import pytest
import torch
from torch import Tensor

from flower_blsgd.tasks.augmentation import random_crop_and_flip

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
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_equals_one_by_one(device: str, dtype: torch.dtype, padding: int) -> None:
    images = images_of(50, dtype, device)
    before = images.clone()
    changed = random_crop_and_flip(images, generator_of(3, device), padding)
    assert torch.equal(changed, one_by_one(images, generator_of(3, device), padding))
    assert changed.dtype == dtype
    assert changed.device == images.device
    assert changed.is_contiguous()
    assert torch.equal(images, before)


def test_random_numbers_come_from_the_generator_alone() -> None:
    images = images_of(20)
    torch.manual_seed(0)
    first = random_crop_and_flip(images, generator_of(1))
    torch.manual_seed(1)
    assert torch.equal(random_crop_and_flip(images, generator_of(1)), first)
    assert not torch.equal(random_crop_and_flip(images, generator_of(2)), first)
    generator = generator_of(1)
    random_crop_and_flip(images, generator)
    assert not torch.equal(random_crop_and_flip(images, generator), first)


def test_half_is_mirrored_and_every_place_is_equally_likely() -> None:
    count, padding = 20_000, 1
    image = torch.arange(1.0, 10.0).reshape(1, 1, 3, 3)
    changed = random_crop_and_flip(image.expand(count, -1, -1, -1), generator_of(0), padding)
    found: dict[tuple[float, ...], int] = {}
    for row in changed.flatten(1).tolist():
        found[tuple(row)] = found.get(tuple(row), 0) + 1
    assert len(found) == 9 * 2  # nine places, mirrored or not
    assert all(abs(number - count / 18) < 5 * (count / 18) ** 0.5 for number in found.values())
    still = random_crop_and_flip(image.expand(count, -1, -1, -1), generator_of(0), 0)
    mirrored = int((still[:, 0, 0, 0] == 3).sum())
    assert abs(mirrored - count / 2) < 5 * (count / 4) ** 0.5


def test_what_is_outside_is_black() -> None:
    image = torch.full((1, 1, 2, 2), 9, dtype=torch.uint8)
    changed = random_crop_and_flip(image.expand(200, -1, -1, -1), generator_of(0), 2)
    assert set(changed.flatten().tolist()) == {0, 9}
    assert (changed.sum(dim=(1, 2, 3)) == 0).any()  # cut wholly from the margin


def test_empty_batch() -> None:
    assert random_crop_and_flip(images_of(0), generator_of(0)).shape == (0, 3, 10, 12)
