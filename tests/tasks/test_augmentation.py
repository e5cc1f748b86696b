"""Random crops and flips of a whole batch."""

import importlib

import pytest
import torch
from torch import Tensor

from flower_blsgd.data.source import import_torchvision
from flower_blsgd.tasks.images import random_crop_and_flip, random_resized_crop_and_flip

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


# crops of large images


def test_resized_crops_are_those_of_torchvision_one_by_one() -> None:
    """Each image has a crop of its own, drawn from the generator alone."""
    images = images_of(6)
    before, state = images.clone(), torch.get_rng_state()
    generator = generator_of(3)
    changed = random_resized_crop_and_flip(images, generator, 8)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images, before)
    assert (changed.shape, changed.dtype) == ((6, 3, 8, 8), torch.uint8)
    assert not torch.equal(random_resized_crop_and_flip(images, generator, 8), changed)
    import_torchvision()
    v2 = importlib.import_module("torchvision.transforms.v2")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator_of(3))))
        crop, flip = v2.RandomResizedCrop(8), v2.RandomHorizontalFlip()
        for image, one in zip(images, changed, strict=True):
            assert torch.equal(flip(crop(image)), one)
