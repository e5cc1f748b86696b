"""Flowers-102 as it is published, with real MATLAB files."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from flower_blsgd.data.flowers_folder import flowers_splits
from flower_blsgd.data.image_split import ImageSplit
from flower_blsgd.data.source import find_source
from flower_blsgd.errors import UsageError

from .image_files import encoded, pixels

TRAIN, VALIDATION, TEST = (3, 1), (4,), (2, 6, 5)
LABELS = (102, 7, 1, 7, 50, 51)
"""Of the images 1 to 6."""


def make_flowers(
    root: Path,
    train: tuple[int, ...] = TRAIN,
    validation: tuple[int, ...] = VALIDATION,
    test: tuple[int, ...] = TEST,
    labels: tuple[int, ...] = LABELS,
) -> Path:
    """Write images, the image k as `pixels(k)`, and the two lists as torchvision has them."""
    folder = root / "flowers-102"
    (folder / "jpg").mkdir(parents=True)
    for number in range(1, len(labels) + 1):
        jpeg = encoded(pixels(number, 8), "JPEG")
        (folder / "jpg" / f"image_{number:05}.jpg").write_bytes(jpeg)
    # As published: rows, in the smallest types that hold them.
    savemat(folder / "imagelabels.mat", {"labels": np.array([labels], np.uint8)})
    ids = {"trnid": train, "valid": validation, "tstid": test}
    savemat(folder / "setid.mat", {name: np.array([ids[name]], np.uint16) for name in ids})
    return folder


def splits_of(folder: Path) -> dict[str, ImageSplit] | None:
    found = flowers_splits(find_source("hub/name", str(folder), "LAYOUT"))
    return None if found is None else dict(found)


@pytest.mark.parametrize("parent", [False, True])
def test_splits(tmp_path: Path, parent: bool) -> None:
    folder = make_flowers(tmp_path)
    splits = splits_of(tmp_path if parent else folder)
    assert splits is not None
    assert {name: split.labels.tolist() for name, split in splits.items()} == {
        "train": [0, 101],
        "validation": [6],
        "test": [6, 50, 49],
    }
    assert splits["test"].class_names == ()
    assert splits["test"].stored(1, 3) == [
        {"bytes": None, "path": str(folder / "jpg" / "image_00006.jpg")},
        {"bytes": None, "path": str(folder / "jpg" / "image_00005.jpg")},
    ]


def test_other_folders_are_left_to_others(tmp_path: Path) -> None:
    assert splits_of(tmp_path) is None
    (make_flowers(tmp_path) / "imagelabels.mat").unlink()
    (tmp_path / "flowers-102" / "setid.mat").unlink()
    assert splits_of(tmp_path) is None


@pytest.mark.parametrize("name", ["imagelabels.mat", "setid.mat"])
def test_one_of_the_two_lists_is_missing(tmp_path: Path, name: str) -> None:
    (make_flowers(tmp_path) / name).unlink()
    with pytest.raises(UsageError, match=rf"flowers-102/{name} is missing; unpack the archive"):
        splits_of(tmp_path)


def test_lists_that_contradict_each_other(tmp_path: Path) -> None:
    make_flowers(tmp_path / "a", test=(2, 7))
    with pytest.raises(UsageError, match=r"names the images 2 to 7 in tstid, but .* has 6 labels"):
        splits_of(tmp_path / "a")
    make_flowers(tmp_path / "b", labels=(0, 1, 2, 3, 4, 5))
    with pytest.raises(UsageError, match=r"imagelabels.mat has the label 0"):
        splits_of(tmp_path / "b")
    make_flowers(tmp_path / "c", validation=())
    with pytest.raises(UsageError, match=r"setid.mat has an empty valid"):
        splits_of(tmp_path / "c")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = make_flowers(tmp_path)
    whole = (folder / "setid.mat").read_bytes()
    for damaged in (b"", b"no MATLAB file", whole[:200]):
        (folder / "setid.mat").write_bytes(damaged)
        with pytest.raises(UsageError, match=r"setid.mat cannot be read \(") as refused:
            splits_of(folder)
        assert "\n" not in str(refused.value)
    savemat(folder / "setid.mat", {"other": np.zeros(2)})
    with pytest.raises(UsageError, match=r"setid.mat cannot be read \(no variable trnid\)"):
        splits_of(folder)
    (folder / "jpg").rename(folder / "png")
    with pytest.raises(UsageError, match=r"jpg is missing; unpack the archive again"):
        splits_of(folder)
