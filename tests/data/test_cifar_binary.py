"""The binary versions of CIFAR, byte by byte, and the refusal of the pickles."""

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from flower_blsgd.data.cifar_binary import (
    CIFAR10_FILES,
    CIFAR100_FILES,
    CifarFiles,
    cifar_splits,
)
from flower_blsgd.data.image_split import ImageSplit
from flower_blsgd.data.source import find_source
from flower_blsgd.errors import UsageError

from ..log_capture import captured_log

CLASSES = ("airplane", "bus", "cat", "deer", "dog", "elk", "frog", "horse", "ship", "truck")


def image(number: int) -> npt.NDArray[np.uint8]:
    """Return an image of its own for each number, as CHW."""
    drawn = np.random.default_rng(number).integers(0, 256, (3, 32, 32))
    return drawn.astype(np.uint8)


def write_rows(path: Path, rows: list[tuple[int, ...]]) -> None:
    """Write rows: labels, and the number of the image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(bytes(labels) + image(k).tobytes() for *labels, k in rows))


def make_cifar10(root: Path, rows_per_file: int = 2) -> Path:
    """Write CIFAR-10; training image k has the label k % 10, test images count from 1000."""
    folder = root / "cifar-10-batches-bin"
    for file in range(5):
        first = file * rows_per_file
        rows = [(k % 10, k) for k in range(first, first + rows_per_file)]
        write_rows(folder / f"data_batch_{file + 1}.bin", rows)
    write_rows(folder / "test_batch.bin", [(9, 1000), (0, 1001)])
    (folder / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n\n")
    return folder


def make_cifar100(root: Path, labels: range = range(100)) -> Path:
    """Write CIFAR-100; image k has the fine label `labels[k]` and the coarse one `k % 20`."""
    folder = root / "cifar-100-binary"
    for name in ("train", "test"):
        rows = [(k % 20, label, k) for k, label in enumerate(labels)]
        write_rows(folder / f"{name}.bin", rows)
    return folder


def splits_of(files: CifarFiles, folder: Path) -> dict[str, ImageSplit] | None:
    found = cifar_splits(files, find_source("hub/name", str(folder), "LAYOUT"))
    return None if found is None else dict(found)


@pytest.mark.parametrize("parent", [False, True])
def test_cifar10(tmp_path: Path, parent: bool) -> None:
    folder = make_cifar10(tmp_path)
    splits = splits_of(CIFAR10_FILES, tmp_path if parent else folder)
    assert splits is not None
    assert splits["train"].labels.tolist() == list(range(10))
    assert splits["test"].labels.tolist() == [9, 0]
    assert splits["train"].class_names == splits["test"].class_names
    assert splits["train"].class_names[::9] == ("airplane", "truck")
    stored = splits["train"].stored(1, 7)  # from the first file to the fourth
    assert np.array_equal(np.stack(stored), np.stack([image(k) for k in range(1, 7)]))
    assert np.array_equal(splits["test"].stored(1, 2)[0], image(1001))


def test_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    splits = splits_of(CIFAR100_FILES, make_cifar100(tmp_path, range(7, 50)))
    assert splits is not None
    assert splits["train"].labels.tolist() == list(range(7, 50))
    assert splits["train"].class_names == ()
    assert np.array_equal(splits["train"].stored(3, 4)[0], image(3))


def test_other_folders_are_left_to_others(tmp_path: Path) -> None:
    make_cifar100(tmp_path)
    assert splits_of(CIFAR10_FILES, tmp_path) is None
    assert cifar_splits(CIFAR10_FILES, find_source("hub/name", "", "LAYOUT")) is None


@pytest.mark.parametrize(
    ("files", "folder", "marks"),
    [
        (CIFAR10_FILES, "cifar-10-batches-py", ["data_batch_1"]),
        (CIFAR100_FILES, "cifar-100-python", ["train", "meta"]),
    ],
    ids=["cifar10", "cifar100"],
)
def test_pickles_are_refused(
    tmp_path: Path, files: CifarFiles, folder: str, marks: list[str]
) -> None:
    (tmp_path / folder).mkdir()
    for mark in marks:
        (tmp_path / folder / mark).write_bytes(b"\x80\x02.")
    for given in (tmp_path, tmp_path / folder):
        with pytest.raises(UsageError) as refused:
            splits_of(files, given)
        assert str(refused.value) == (
            f"data = {str(given)!r}: {tmp_path / folder} holds pickles ({files.title}'s Python "
            "version), which can run code and are not read; expected LAYOUT"
        )


def test_an_image_folder_is_no_python_version(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "meta").write_text("")
    assert splits_of(CIFAR100_FILES, tmp_path) is None


def test_the_binary_version_is_read_beside_the_pickles(tmp_path: Path) -> None:
    make_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"\x80\x02.")
    assert splits_of(CIFAR10_FILES, tmp_path) is not None


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("data_batch_3.bin", None, "data_batch_3.bin cannot be read (No such file"),
        ("test_batch.bin", b"", "test_batch.bin has 0 bytes, which are not rows of 3073"),
        ("test_batch.bin", bytes(3074), "has 3074 bytes, which are not rows of 3073"),
        (
            "test_batch.bin",
            bytes(3073) + b"\x0a" + bytes(3072),
            "has the label 10 in row 1; CIFAR-10 has up to 9",
        ),
        ("batches.meta.txt", b"\xff\xfe\x80", "batches.meta.txt is not text"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, name: str, content: bytes | None, told: str
) -> None:
    folder = make_cifar10(tmp_path)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(UsageError) as refused:
        splits_of(CIFAR10_FILES, tmp_path)
    assert told in str(refused.value)
    assert str(refused.value).endswith("; unpack the archive again, or name another folder")


def test_a_file_that_ends_early_between_two_rows_is_told(tmp_path: Path) -> None:
    folder = make_cifar10(tmp_path)
    with captured_log() as log:
        splits_of(CIFAR10_FILES, folder)
    assert log.warnings == []
    os.truncate(folder / "data_batch_3.bin", 3073)
    with captured_log() as log:
        splits = splits_of(CIFAR10_FILES, folder)
    assert splits is not None
    assert len(splits["train"]) == 9
    (line,) = log.warnings
    assert line.startswith(f"data = {str(folder)!r}: files of train have different numbers of im")
    assert "data_batch_2.bin 2, data_batch_3.bin 1, data_batch_4.bin 2" in line
