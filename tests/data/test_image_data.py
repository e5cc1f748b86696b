"""The image data sets in the forms of tables, of folders and of their archives, as arrays."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

pytest.importorskip("datasets")

from flower_blsgd.data.image_data import (
    CIFAR10,
    CIFAR100,
    FLOWERS102,
    TINY_IMAGENET,
    ImageData,
    decoded,
    prepared_images,
)

from ..refusal import refusal
from .archive_files import (
    WORDNET_IDS,
    cifar_image,
    make_cifar10,
    make_cifar100,
    make_flowers,
    make_tiny_imagenet,
)
from .image_files import broken_jpeg, encoded, make_folders, make_parquet, pixels, png

Make = Callable[[Path], Path]
Damage = Callable[[Path], object]

IMAGES = [png(k) for k in range(6)]


def chw(*numbers: int) -> npt.NDArray[np.uint8]:
    return np.stack([pixels(number).transpose(2, 0, 1) for number in numbers])


def refused(images: ImageData, data: Path, **options: Any) -> str:
    return refusal(prepared_images, images, str(data), **options)


# --- folders and tables


def test_image_folders_come_out_as_they_are(tmp_path: Path) -> None:
    images = prepared_images(CIFAR10, str(make_folders(tmp_path / "own")))
    assert images.num_classes == 3
    assert images.train[1].tolist() == [0, 0, 1, 1, 2, 2]
    assert np.array_equal(images.train[0], chw(0, 3, 1, 4, 2, 5))
    assert np.array_equal(images.test[0], chw(1000, 1001, 1002))
    assert images.test[1].tolist() == [0, 1, 2]
    assert (images.skipped, images.noun) == ({"train": 0, "test": 0}, "images")


@pytest.mark.parametrize(("image", "hints"), [("img", True), ("image", False)])
def test_parquet_comes_out_as_it_is(tmp_path: Path, image: str, hints: bool) -> None:
    """Whether its metadata say that a column holds images or not."""
    folder = make_parquet(tmp_path / "own", IMAGES, IMAGES[:3], image, hints=hints)
    images = prepared_images(CIFAR10, str(folder))
    assert np.array_equal(images.train[0], chw(*range(6)))
    assert images.train[1].tolist() == [0, 1, 2, 0, 1, 2]


def test_bad_images_are_refused_or_left_out_and_only_the_first_rows_count(tmp_path: Path) -> None:
    train = [png(0), png(1), broken_jpeg(), png(3), b"nor this", png(5)]
    folder = make_parquet(tmp_path / "own", train, [png(10), png(11), None])
    first = prepared_images(CIFAR10, str(folder), max_samples=2)
    assert (first.train[1].tolist(), first.test[1].tolist()) == ([0, 1], [0, 1])
    assert np.array_equal(first.train[0], chw(0, 1))
    message = refused(CIFAR10, folder, max_samples=3)
    assert message.startswith("data: row 2 of train cannot be used (image file is truncated")
    assert message.endswith("; skip-bad = true skips such rows")
    whole = prepared_images(CIFAR10, str(folder), skip_bad=True, max_samples=1000)
    assert whole.skipped == {"train": 2, "test": 1}
    assert whole.train[1].tolist() == [0, 1, 0, 2]
    assert np.array_equal(whole.train[0], chw(0, 1, 3, 5))
    assert len({first.folder, whole.folder}) == 2  # another number of rows is another entry


# --- archives


def test_cifar10(tmp_path: Path) -> None:
    folder = make_cifar10(tmp_path / "own")
    images = prepared_images(CIFAR10, str(folder))
    assert (images.train[1].tolist(), images.test[1].tolist()) == (list(range(10)), [9, 0])
    assert np.array_equal(images.train[0], np.stack([cifar_image(k) for k in range(10)]))
    assert np.array_equal(images.test[0][1], cifar_image(1001))
    assert prepared_images(CIFAR10, str(tmp_path / "own")).fingerprint == images.fingerprint


def test_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    images = prepared_images(CIFAR100, str(make_cifar100(tmp_path / "own")))
    assert (images.num_classes, images.test[1].tolist()) == (100, list(range(100)))
    assert np.array_equal(images.train[0][3], cifar_image(3))
    message = refused(CIFAR100, make_cifar100(tmp_path / "few", range(99)), max_samples=1)
    assert "wrong number of classes: found 99 and labels up to 98, expected the 100 of" in message


def test_flowers_are_cut_in_two_ways(tmp_path: Path) -> None:
    labels = [k % 102 + 1 for k in range(110)]
    folder = make_flowers(tmp_path / "own", (2, 1), (110,), range(109, 2, -1), labels)
    small = {name: dataclasses.replace(images, side=8) for name, images in FLOWERS102.items()}
    official = prepared_images(small["official"], str(folder))
    paper = prepared_images(small["paper"], str(folder))
    assert official.train[1].tolist() == [1, 0]
    assert official.test[1].tolist() == [(number - 1) % 102 for number in range(109, 2, -1)]
    assert paper.train[1].tolist() == [*official.train[1], *official.test[1]]
    assert np.array_equal(paper.train[0][2:], official.test[0])
    second = decoded({"bytes": encoded(pixels(2, 8), "JPEG")}, 8)
    assert np.array_equal(official.train[0][0], second)
    assert paper.test[1].tolist() == [109 % 102]
    assert official.num_classes == paper.num_classes == 102
    (folder / "jpg" / "image_00050.jpg").unlink()
    message = refused(small["paper"], folder)
    assert message.startswith("data: row 61 of train cannot be used (")
    assert "image_00050.jpg" in message


def test_tiny_imagenet(tmp_path: Path) -> None:
    folder = make_tiny_imagenet(tmp_path / "own")
    for name in ("Thumbs.db", "._n01443537_0.JPEG"):  # what systems leave beside images
        (folder / "train" / WORDNET_IDS[0] / "images" / name).write_bytes(b"x")
    few = dataclasses.replace(TINY_IMAGENET, num_classes=len(WORDNET_IDS))
    images = prepared_images(few, str(tmp_path / "own"))
    assert images.train[1].tolist() == [0, 0, 1, 1, 2, 2]
    assert images.test[1].tolist() == [2, 1, 0]
    found = np.concatenate([images.train[0], images.test[0]])
    for image, number in zip(found, (*range(6), 1002, 1001, 1000), strict=True):
        assert np.array_equal(image, decoded(encoded(pixels(number, 64), "JPEG"), 64))


@pytest.mark.parametrize(
    ("images", "make", "damage", "why"),
    [
        (
            FLOWERS102["paper"],
            lambda root: make_flowers(root, test=(2, 7)),
            lambda folder: None,
            "index 6 is out of bounds for axis 0 with size 6",
        ),
        (
            TINY_IMAGENET,
            make_tiny_imagenet,
            lambda folder: (folder / "train" / WORDNET_IDS[1]).rename(folder / "x"),
            f"there is no image of {WORDNET_IDS[1]}",
        ),
    ],
)
def test_damaged_archives_are_refused_in_a_line(
    tmp_path: Path, images: ImageData, make: Make, damage: Damage, why: str
) -> None:
    damage(make(tmp_path / "own"))
    message = refused(images, tmp_path / "own")
    assert message.startswith(f"data = {str(tmp_path / 'own')!r} cannot be read (")
    assert why in message
    assert message.endswith("; unpack the archive again, or name another folder")


# --- one image


def stored(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "TIFF")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("columns", "height", "expected"),
    [
        ([9, 100, 200, 9], 2, [100, 200]),
        # Half the size: 3/8 each of two pixels and 1/8 of those beside; pixels beyond the cut
        # count: (255 + 3 * 0 + 3 * 70 + 140) / 8.
        ([255, 255, 0, 70, 140, 210, 255, 255], 4, [76, 172]),
    ],
)
def test_the_middle_is_kept_and_resized_without_aliasing(
    columns: list[int], height: int, expected: list[int]
) -> None:
    grey = np.tile(np.array(columns, np.uint8), (height, 1))
    square = decoded(stored(Image.fromarray(grey)), 2)
    assert square.tolist() == [[expected] * 2] * 3
    assert np.array_equal(decoded(stored(Image.fromarray(grey.T)), 2), square.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("image", "colour"),
    [
        (Image.new("L", (4, 4), 77), (77, 77, 77)),
        (Image.new("RGBA", (4, 4), (1, 2, 3, 0)), (1, 2, 3)),
        (Image.new("RGB", (4, 4), (10, 20, 30)).quantize(2), (10, 20, 30)),
        (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), (255, 0, 0)),
        (Image.fromarray(np.full((4, 4), 32896, np.uint16)), (128, 128, 128)),
    ],
    ids=["L", "RGBA", "P", "CMYK", "I;16"],
)
@pytest.mark.parametrize("side", [4, 2])
def test_all_kinds_become_rgb(image: Image.Image, colour: tuple[int, ...], side: int) -> None:
    square = decoded(stored(image), side)
    assert square.transpose(1, 2, 0).tolist() == [[list(colour)] * side] * side


def test_what_may_mean_anything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the white level of mode F \(32 bits\) is undefined"):
        decoded(stored(Image.new("F", (4, 4), 70_000)), 4)
    with pytest.raises(ValueError, match="a relative path is ambiguous"):
        decoded({"bytes": None, "path": "0.png"}, 4)
