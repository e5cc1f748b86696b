"""Image data sets as their authors publish them, byte by byte, and damaged copies."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from flower_blsgd.data.image_archives import (
    cifar10_splits,
    cifar100_splits,
    flowers_splits,
    tiny_imagenet_splits,
)
from flower_blsgd.data.source import DataSource, find_source
from flower_blsgd.data.splits import Split
from flower_blsgd.errors import UsageError

from .archive_files import (
    CIFAR10_CLASSES,
    WORDNET_IDS,
    cifar_image,
    make_cifar10,
    make_cifar100,
    make_flowers,
    make_tiny_imagenet,
)

Read = Callable[[DataSource], Mapping[str, Split] | None]
Make = Callable[[Path], Path]
Damage = Callable[[Path], object]

FORMS: list[tuple[Read, Make]] = [
    (cifar10_splits, make_cifar10),
    (cifar100_splits, make_cifar100),
    (flowers_splits, make_flowers),
    (tiny_imagenet_splits, make_tiny_imagenet),
]


def splits_of(read: Read, folder: Path) -> Mapping[str, Split]:
    splits = read(find_source("hub/name", str(folder), "LAYOUT"))
    assert splits is not None
    return splits


def labels_of(splits: Mapping[str, Split]) -> dict[str, list[int]]:
    return {name: split.labels.tolist() for name, split in splits.items()}


def paths_of(split: Split, first: int, last: int) -> list[str]:
    """Return the names of the files of some rows, which must be there."""
    stored = split.stored(first, last)
    assert all(one["bytes"] is None and Path(one["path"]).is_file() for one in stored)
    return [Path(one["path"]).name for one in stored]


@pytest.mark.parametrize(("read", "make"), FORMS)
def test_a_folder_is_found_in_its_parent_and_others_are_left_alone(
    tmp_path: Path, read: Read, make: Make
) -> None:
    assert read(find_source("hub/name", str(tmp_path), "LAYOUT")) is None
    assert read(find_source("hub/name", "", "LAYOUT")) is None
    folder = make(tmp_path)
    assert labels_of(splits_of(read, folder)) == labels_of(splits_of(read, tmp_path))
    for other, _ in FORMS:
        if other is not read:
            assert other(find_source("hub/name", str(tmp_path), "LAYOUT")) is None


def test_cifar10(tmp_path: Path) -> None:
    splits = splits_of(cifar10_splits, make_cifar10(tmp_path))
    assert labels_of(splits) == {"train": list(range(10)), "test": [9, 0]}
    assert splits["train"].class_names == splits["test"].class_names == CIFAR10_CLASSES
    stored = splits["train"].stored(1, 7)  # from the first file to the fourth
    assert np.array_equal(np.stack(stored), np.stack([cifar_image(k) for k in range(1, 7)]))
    assert np.array_equal(splits["test"].stored(1, 2)[0], cifar_image(1001))


def test_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    splits = splits_of(cifar100_splits, make_cifar100(tmp_path, range(7, 50)))
    assert splits["train"].labels.tolist() == list(range(7, 50))
    assert splits["train"].class_names == ()
    assert np.array_equal(splits["train"].stored(3, 4)[0], cifar_image(3))


def test_flowers(tmp_path: Path) -> None:
    splits = splits_of(flowers_splits, make_flowers(tmp_path))
    assert labels_of(splits) == {"train": [0, 101], "validation": [6], "test": [6, 50, 49]}
    assert splits["test"].class_names == ()
    assert paths_of(splits["test"], 1, 3) == ["image_00006.jpg", "image_00005.jpg"]


def test_tiny_imagenet(tmp_path: Path) -> None:
    folder = make_tiny_imagenet(tmp_path)
    for name in ("Thumbs.db", "._n01443537_0.JPEG"):  # what systems leave beside images
        (folder / "train" / WORDNET_IDS[0] / "images" / name).write_bytes(b"x")
    splits = splits_of(tiny_imagenet_splits, folder)
    assert splits["train"].class_names == splits["valid"].class_names == WORDNET_IDS
    assert labels_of(splits) == {"train": [0, 0, 1, 1, 2, 2], "valid": [2, 1, 0]}
    assert paths_of(splits["train"], 3, 4) == ["n02124075_1.JPEG"]
    assert paths_of(splits["valid"], 0, 3) == ["val_0.JPEG", "val_1.JPEG", "val_2.JPEG"]


def _write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def _remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def _rename(name: str, new: str) -> Damage:
    return lambda folder: (folder / name).rename(folder / new)


def _flowers(file: str, **variables: list[int]) -> Damage:
    return lambda folder: savemat(folder / file, variables)


CIFAR_ROW = bytes(3073)
LINE = b"val_9.JPEG\tn00000000\t0\t0\t1\t1\n"


@pytest.mark.parametrize(
    ("read", "make", "damage", "named"),
    [
        (*FORMS[0], _remove("data_batch_3.bin"), "data_batch_3.bin"),
        (*FORMS[0], _write("test_batch.bin", CIFAR_ROW + b"0"), "has 3074 bytes, which are not"),
        (
            *FORMS[0],
            _write("test_batch.bin", CIFAR_ROW + b"\x0a" + CIFAR_ROW[1:]),
            "test_batch.bin has the label 10 in row 1, of up to 9",
        ),
        (*FORMS[2], _write("setid.mat", b"no MATLAB file"), "setid.mat cannot be read ("),
        (
            *FORMS[2],
            _flowers("setid.mat", trnid=[1], valid=[1], tstid=[2, 7]),
            "index 6 is out of bounds for axis 0 with size 6",
        ),
        (*FORMS[2], _flowers("imagelabels.mat", labels=[0, 1, 2]), "has no numbers from 1 on in l"),
        (*FORMS[3], _write("val/val_annotations.txt", LINE), "must name a class of wnids.txt"),
        (*FORMS[3], _rename(f"train/{WORDNET_IDS[1]}", "x"), "images holds no *.JPEG"),
    ],
)
def test_damaged_copies_are_refused_in_a_line_that_names_the_file(
    tmp_path: Path, read: Read, make: Make, damage: Damage, named: str
) -> None:
    damage(make(tmp_path))
    with pytest.raises(UsageError) as refused:
        splits_of(read, tmp_path)
    message = str(refused.value)
    assert named in message
    assert message.startswith(f"data = {str(tmp_path)!r}: ")
    assert message.endswith("; unpack the archive again, or name another folder")
    assert "\n" not in message
