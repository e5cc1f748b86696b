"""The image data sets in the forms of the hub, of folders and of their archives."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("datasets")

from flower_blsgd.data.image_data import CIFAR10, CIFAR100, FLOWERS102, ImageData, prepared_images

from ..log_capture import captured_log
from ..refusal import refusal
from .archive_files import make_cifar100, make_flowers
from .image_files import make_folders, make_parquet, pixels, png

IMAGES = [png(k) for k in range(6)]


def small(images: ImageData, **changes: Any) -> ImageData:
    """Return a data set of images of 8 pixels, so that tests write little."""
    return dataclasses.replace(images, side=8, **changes)


def chw(*numbers: int) -> npt.NDArray[np.uint8]:
    return np.stack([pixels(number).transpose(2, 0, 1) for number in numbers])


def refused(images: ImageData, data: Path, **options: Any) -> str:
    return refusal(prepared_images, images, str(data), **options)


# --- folders and tables


def test_image_folders_come_out_as_they_are(tmp_path: Path) -> None:
    images = prepared_images(CIFAR10, str(make_folders(tmp_path / "own")))
    assert images.class_names == ("cat", "dog", "owl")
    assert images.train[1].tolist() == [0, 0, 1, 1, 2, 2]
    assert np.array_equal(images.train[0], chw(0, 3, 1, 4, 2, 5))
    assert np.array_equal(images.test[0], chw(1000, 1001, 1002))
    assert images.test[1].tolist() == [0, 1, 2]
    assert (images.skipped, images.noun) == ({"train": 0, "test": 0}, "images")
    arrays = [f"{part}_{what}.npy" for part in ("test", "train") for what in ("images", "labels")]
    assert sorted(path.name for path in images.folder.iterdir()) == ["meta.json", *arrays]


@pytest.mark.parametrize(("image", "hints"), [("img", True), ("image", False), ("photo", True)])
def test_parquet_comes_out_as_it_is(tmp_path: Path, image: str, hints: bool) -> None:
    """Images are a column of the usual name, or the only one that is said to hold images."""
    folder = make_parquet(tmp_path / "own", IMAGES, IMAGES[:3], image, hints=hints)
    images = prepared_images(CIFAR10, str(folder))
    assert images.class_names == ("0", "1", "2")
    assert np.array_equal(images.train[0], chw(*range(6)))
    assert images.train[1].tolist() == [0, 1, 2, 0, 1, 2]


def test_images_without_labels(tmp_path: Path) -> None:
    """The library gives images that are in no folder of a class a label without a value."""
    for split in ("train", "test"):
        (tmp_path / "own" / split).mkdir(parents=True)
        for k in range(3):
            (tmp_path / "own" / split / f"{k}.png").write_bytes(png(k))
    message = refused(CIFAR10, tmp_path / "own")
    assert "3 rows of train have no label; expected" in message
    assert "train/<class>/*.png" in message


# --- archives


def test_flowers_are_cut_in_two_ways(tmp_path: Path) -> None:
    labels = [k % 102 + 1 for k in range(110)]
    folder = make_flowers(tmp_path / "own", (2, 1), (110,), range(109, 2, -1), labels)
    official = prepared_images(small(FLOWERS102["official"]), str(folder))
    paper = prepared_images(small(FLOWERS102["paper"]), str(folder))
    assert official.train[1].tolist() == [1, 0]
    assert official.test[1].tolist() == [(number - 1) % 102 for number in range(109, 2, -1)]
    assert paper.train[1].tolist() == [*official.train[1], *official.test[1]]
    assert np.array_equal(paper.train[0][2:], official.test[0])
    assert paper.test[1].tolist() == [109 % 102]
    assert len(official.class_names) == len(paper.class_names) == 102
    assert official.folder != paper.folder
    (folder / "jpg" / "image_00050.jpg").unlink()
    message = refused(small(FLOWERS102["paper"]), folder)
    assert message.startswith("data: image 61 of train + test cannot be decoded (")
    assert message.count("image_00050.jpg") == 1


# --- classes


def test_classes_are_counted_in_all_rows_of_all_splits(tmp_path: Path, cache: Path) -> None:
    labels = {"train": [0, 1] * 3, "test": [0, 5] * 3}
    folder = make_parquet(tmp_path / "own", IMAGES, IMAGES, labels=labels)
    with captured_log() as log:
        assert len(prepared_images(CIFAR10, str(folder), max_samples=1).class_names) == 6
    assert len(log.warnings) == 1
    assert log.warnings[0].endswith("the 1 images to train on do not show 1, 2, 3, 4, 5")
    made = len(list(cache.iterdir()))
    make_cifar100(tmp_path / "few", range(99))
    message = refused(CIFAR100, tmp_path / "few", max_samples=1)
    assert "wrong number of classes: found 99, expected the 100 of cifar100" in message
    assert len(list(cache.iterdir())) == made + 1  # a lock


# --- some of the rows


def test_bad_images_are_refused_or_left_out_and_only_the_first_rows_count(tmp_path: Path) -> None:
    train = [png(0), png(1), b"no image", png(3), b"nor this", png(5)]
    folder = make_parquet(tmp_path / "own", train, [png(10), png(11), b"bad"])
    first = prepared_images(CIFAR10, str(folder), max_samples=2)
    assert (first.train[1].tolist(), first.test[1].tolist()) == ([0, 1], [0, 1])
    assert np.array_equal(first.train[0], chw(0, 1))
    assert "image 2 of train cannot be decoded" in refused(CIFAR10, folder, max_samples=3)
    whole = prepared_images(CIFAR10, str(folder), skip_bad=True, max_samples=1000)
    assert whole.skipped == {"train": 2, "test": 1}
    assert whole.train[1].tolist() == [0, 1, 0, 2]
    assert np.array_equal(whole.train[0], chw(0, 1, 3, 5))
    assert "image 2 of train cannot be decoded" in refused(CIFAR10, folder)
    assert first.folder.is_dir()  # another number of rows is another entry
