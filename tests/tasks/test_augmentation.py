"""Random crops and flips of a whole batch."""

import importlib

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from flower_blsgd.data.libraries import import_torchvision
from flower_blsgd.tasks.images import (
    random_boxes,
    random_crop_and_flip,
    random_resized_crop_and_flip,
)

from ..fake_cuda.log import recorded

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


# --- crops of large images


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("side", [4, 8, 20])  # smaller and larger than the crops
def test_resized_crops_are_those_of_torch_one_by_one(
    device: str, dtype: torch.dtype, side: int
) -> None:
    images = images_of(40, dtype, device)
    before, state = images.clone(), torch.get_rng_state()
    generator = generator_of(3, device)
    changed = random_resized_crop_and_flip(images, generator, side)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images, before)
    assert (changed.shape, changed.dtype) == ((40, 3, side, side), dtype)
    assert not torch.equal(random_resized_crop_and_flip(images, generator, side), changed)
    boxes = torch.cat(random_boxes(40, 10, 12, generator_of(3, device)), 1).long().tolist()
    assert {mirrored for *_, mirrored in boxes} == {0, 1}
    for image, one, (top, left, height, width, mirrored) in zip(
        images.cpu().float(), changed.cpu().float(), boxes, strict=True
    ):
        cut = image[None, :, top : top + height, left : left + width]
        assert cut.shape[2:] == (height, width)
        expected = interpolate(cut, (side, side), mode="bilinear", antialias=True)[0]
        expected = expected.flip(2) if mirrored else expected
        assert torch.allclose(one, expected, atol=1e-3 if dtype.is_floating_point else 0.501)


def test_boxes_are_distributed_as_those_of_torchvision() -> None:
    """The tolerance is five standard errors."""
    import_torchvision()
    v1 = importlib.import_module("torchvision.transforms")
    image, count = torch.zeros(1, 90, 120), 2000
    top, left, rows, columns, mirrored = random_boxes(count, 90, 120, generator_of(1))
    ours = torch.cat([top, left, rows, columns], 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        drawn = [
            v1.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
            for _ in range(count)
        ]
    theirs = torch.tensor(drawn).float()
    for moment in (1, 2):
        error = ((ours**moment).var(0) + (theirs**moment).var(0)).div(count).sqrt()
        apart = ((ours**moment).mean(0) - (theirs**moment).mean(0)).abs()
        assert (apart < 5 * error).all(), (moment, apart, error)
    assert float(mirrored.float().mean()) == pytest.approx(0.5, abs=0.04)
    assert int((top + rows).max()) == 90
    assert int((left + columns).max()) == 120


def test_crop_that_cannot_fit_is_the_whole_image() -> None:
    top, left, rows, columns, _ = random_boxes(5, 1000, 2, generator_of(1))
    assert torch.cat([top, left, rows, columns], 1).tolist() == [[0, 0, 1000, 2]] * 5


@pytest.mark.cuda
def test_resized_crops_need_the_same_operations_for_all_batches_and_no_wait() -> None:
    generator, kernels = generator_of(3, "cuda"), []
    for count in (2, 50):
        images = images_of(count, device="cuda")
        with recorded() as events:
            random_resized_crop_and_flip(images, generator, 8)
        assert {event.kind for event in events} == {"kernel", "copy on card"}
        assert not any(event.blocking for event in events)
        kernels.append(len(events))
    assert kernels[0] == kernels[1]
