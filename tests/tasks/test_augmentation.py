"""Random crops and flips of a whole batch."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flower_blsgd.tasks.augmentation import (
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


# --- random boxes


def share_below(values: Tensor, limit: float) -> float:
    return float((values < limit).double().mean())


def test_boxes_lie_within_the_image() -> None:
    top, left, rows, columns = random_boxes(20_000, 40, 60, generator_of(1))
    assert torch.equal(rows, rows.round())
    assert torch.equal(left, left.round())
    for first, size, whole in ((top, rows, 40), (left, columns, 60)):
        assert float(first.min()) == 0
        assert float((first + size).max()) == whole
        assert float(size.min()) >= 1


def test_areas_and_ratios_of_boxes_follow_their_distribution() -> None:
    """Small boxes always fit, so theirs is not bent by trying again."""
    count, side = 40_000, 1000
    boxes = random_boxes(count, side, side, generator_of(2), scale=(0.1, 0.5))
    _, _, rows, columns = boxes.double()
    areas = rows * columns / side**2
    ratios = torch.log(columns / rows) / math.log(4 / 3)
    assert float(areas.min()) >= 0.099
    assert float(areas.max()) <= 0.501
    assert float(ratios.abs().max()) <= 1.01
    for part in (0.1, 0.25, 0.5, 0.8):  # both uniform; the mean of a share has an error of 0.0025
        assert share_below(areas, 0.1 + 0.4 * part) == pytest.approx(part, abs=0.0125)
        assert share_below(ratios, 2 * part - 1) == pytest.approx(part, abs=0.0125)
    assert float(torch.corrcoef(torch.stack((areas, ratios)))[0, 1]) == pytest.approx(0, abs=0.025)


def test_places_of_boxes_are_uniform() -> None:
    top, left, rows, columns = random_boxes(40_000, 1000, 1000, generator_of(3), scale=(0.1, 0.5))
    places = torch.stack(
        [(first + 0.5) / (1000 - size + 1) for first, size in ((top, rows), (left, columns))]
    )
    for part in (0.1, 0.5, 0.9):
        assert share_below(places[0], part) == pytest.approx(part, abs=0.0125)
        assert share_below(places[1], part) == pytest.approx(part, abs=0.0125)
    assert float(torch.corrcoef(places)[0, 1]) == pytest.approx(0, abs=0.025)


def one_box(side: int, generator: torch.Generator) -> tuple[int, int]:
    """Return height and width as torchvision's RandomResizedCrop finds them."""

    def drawn() -> float:
        return float(torch.rand(1, generator=generator))

    for _ in range(10):
        area = side**2 * (0.08 + 0.92 * drawn())
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * drawn())
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= side and 0 < height <= side:
            return height, width
    return side, side


def test_boxes_are_distributed_like_those_of_torchvision() -> None:
    """Also where boxes do not fit, and are drawn again."""
    count = 20_000
    _, _, rows, columns = random_boxes(count, 256, 256, generator_of(4)).double()
    generator = generator_of(5)
    theirs = torch.tensor([one_box(256, generator) for _ in range(count)]).double()
    for ours, expected in (
        (rows, theirs[:, 0]),
        (columns, theirs[:, 1]),
        (rows * columns, theirs.prod(dim=1)),
        (rows / columns, theirs[:, 0] / theirs[:, 1]),
    ):
        for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
            limit = float(torch.quantile(expected, quantile))
            assert share_below(ours, limit) == pytest.approx(
                share_below(expected, limit), abs=5 * math.sqrt(2 * 0.25 / count)
            )


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(30, 30, (30, 30)), (10, 90, (10, 13)), (90, 10, (13, 10)), (1, 1, (1, 1))],
)
def test_box_that_never_fits_is_the_largest_of_an_allowed_ratio(
    height: int, width: int, expected: tuple[int, int]
) -> None:
    boxes = random_boxes(50, height, width, generator_of(0), scale=(9.0, 9.0))
    assert {(int(rows), int(columns)) for rows, columns in boxes[2:].T} == {expected}
    assert float((boxes[0] + boxes[2]).max()) <= height
    assert float((boxes[1] + boxes[3]).max()) <= width


# --- random boxes, resized


def coarse_images(count: int, height: int, width: int) -> Tensor:
    coarse = torch.rand(count, 3, 7, 7, generator=generator_of(9)) * 255
    return functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 255)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_resized_crops_equal_one_by_one(device: str, dtype: torch.dtype) -> None:
    count, side = 30, 24
    images = coarse_images(count, 32, 40).to(device, dtype)
    before = images.clone()
    changed = random_resized_crop_and_flip(images, generator_of(3, device), side)
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


@pytest.mark.parametrize("device", DEVICES)
def test_resized_crop_of_the_whole_is_the_image_or_its_mirror_image(device: str) -> None:
    images = images_of(400, device=device)[:, :, :, :10]
    whole = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0)}
    changed = random_resized_crop_and_flip(images, generator_of(0, device), 10, **whole)
    same = (changed == images).flatten(1).all(dim=1)
    mirrored = (changed == images.flip(3)).flatten(1).all(dim=1)
    assert bool((same ^ mirrored).all())
    assert abs(int(mirrored.sum()) - 200) < 5 * 10
    floats = random_resized_crop_and_flip(images.float(), generator_of(0, device), 10, **whole)
    assert torch.allclose(floats, changed.float(), atol=0.01)


def test_resized_crop_sees_nothing_beside_its_box() -> None:
    """The last row and column of a box are not mixed with what lies behind them."""
    generator = generator_of(6)
    top, left, rows, columns = random_boxes(1, 64, 64, generator_of(6))[:, 0].int().tolist()
    image = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    image[:, :, top : top + rows, left : left + columns] = 200
    assert (rows, columns) != (64, 64)
    changed = random_resized_crop_and_flip(image, generator, 224)
    assert set(changed.flatten().tolist()) == {200}


def test_resized_crop_keeps_black_and_white() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 50, 50)
    changed = random_resized_crop_and_flip(images, generator_of(0), 224)
    assert not changed[0].any()
    assert bool((changed[1] == 255).all())


def test_random_numbers_of_resized_crops_come_from_the_generator_alone() -> None:
    images = coarse_images(20, 32, 32).byte()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = random_resized_crop_and_flip(images, generator_of(1), 24)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(random_resized_crop_and_flip(images, generator_of(1), 24), first)
    assert not torch.equal(random_resized_crop_and_flip(images, generator_of(2), 24), first)
    generator = generator_of(1)
    random_resized_crop_and_flip(images, generator, 24)
    assert not torch.equal(random_resized_crop_and_flip(images, generator, 24), first)


def test_resized_crops_of_an_empty_batch() -> None:
    changed = random_resized_crop_and_flip(images_of(0), generator_of(0), 7)
    assert changed.shape == (0, 3, 7, 7)


@pytest.mark.parametrize("transform", [random_crop_and_flip, random_resized_crop_and_flip])
def test_nothing_depends_on_what_was_drawn(transform: object) -> None:
    """On the meta device there are no values: a step that asks for one raises."""
    assert callable(transform)
    images = torch.empty(4, 3, 32, 32, dtype=torch.uint8, device="meta")
    sides = () if transform is random_crop_and_flip else (32,)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rand", "randint"):
            patch.setattr(torch, name, on_meta(getattr(torch, name)))
        assert transform(images, MetaGenerator(), *sides).shape == images.shape


class MetaGenerator:
    """Stands for a generator on a device that has none."""

    device = torch.device("meta")


def on_meta(draw: object) -> object:
    def drawn(*arguments: object, **settings: object) -> Tensor:
        assert isinstance(settings.pop("generator"), MetaGenerator)
        return draw(*arguments, **settings)  # type: ignore[operator, no-any-return]

    return drawn


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("transform", [random_crop_and_flip, random_resized_crop_and_flip])
def test_transforms_do_not_wait_for_the_device(transform: object) -> None:
    assert callable(transform)
    images = images_of(8, device="cuda")[:, :, :, :10].contiguous()
    sides = () if transform is random_crop_and_flip else (10,)
    generator = generator_of(0, "cuda")
    transform(images, generator, *sides)
    torch.cuda.set_sync_debug_mode("error")
    try:
        transform(images, generator, *sides)
    finally:
        torch.cuda.set_sync_debug_mode("default")
