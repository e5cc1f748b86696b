"""A cache that cannot be read, written or cleaned: what is good in it stays."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_blsgd.errors import UsageError

pytest.importorskip("datasets")

from flower_blsgd.data import cache as cache_module
from flower_blsgd.data import entry as entry_module
from flower_blsgd.data import image_data, seal
from flower_blsgd.data.cache import cache_folder
from flower_blsgd.data.entry import OtherFormatError, Prepared, UnusableError
from flower_blsgd.data.image_data import prepared_images
from flower_blsgd.data.image_sets import CIFAR10
from flower_blsgd.data.seal import check_content

from ..log_capture import captured_log
from .image_files import make_folders, pixels


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "own")


def prepare(folder: Path, again: bool = False) -> Prepared:
    return prepared_images(CIFAR10, str(folder), again=again)


def names(cache: Path) -> list[str]:
    """Return the names in the cache but for the lock."""
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


# --- reading


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.EIO])
@pytest.mark.parametrize("what", ["_mapped", "read_meta"])
def test_an_entry_that_cannot_be_read_stays(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, number: int, what: str
) -> None:
    entry = prepare(folder).folder
    inode = entry.stat().st_ino

    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(entry_module, what, refuse)
        with pytest.raises(UsageError) as refused:
            prepare(folder)
    assert str(refused.value) == (
        f"{entry} cannot be read ({os.strerror(number)}) and stays as it is; mend that, or set "
        "BLSGD_CACHE to another folder"
    )
    assert names(cache) == [entry.name]
    assert prepare(folder).folder.stat().st_ino == inode


def test_an_entry_that_another_version_writes_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not there when its place is chosen, and is when it is opened."""
    real, asked = entry_module.open_entry, []

    def open_entry(entry: Path) -> Prepared:
        asked.append(entry)
        if len(asked) == 1:
            raise OtherFormatError("format 99 is not ours")
        return real(entry)

    monkeypatch.setattr(cache_module, "open_entry", open_entry)
    assert len(prepare(folder).train[1]) == 6


# --- writing


def test_the_old_entry_comes_back_if_the_new_one_cannot_be_placed(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = prepare(folder).folder
    inode, rename = entry.stat().st_ino, Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target == entry and path.stat().st_ino != inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(UsageError, match="cannot be written"):
            prepare(folder, again=True)
    assert entry.stat().st_ino == inode
    assert len(prepare(folder).train[1]) == 6


def test_leftovers_that_cannot_be_removed_are_told_and_left(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = cache / ".part.cifar10.123"
    left.mkdir(parents=True)

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        if path == left:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with captured_log() as log:
        entry = prepare(folder).folder
    assert log.warnings == [f"{left} is left over and cannot be removed (Permission denied)"]
    assert names(cache) == sorted([left.name, entry.name])


def test_again_trusts_nothing_that_was_left(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full at the end leaves images that count as done, here garbled."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "seal_entry", full)
        with pytest.raises(UsageError, match="the next start goes on with what is done"):
            prepare(folder)
        with pytest.raises(UsageError, match=r"to another folder$"):
            prepare(folder, again=True)
    (images,) = cache.glob(".part.*/train_images.npy")
    garbled = np.load(images, mmap_mode="r+")
    garbled[:] = 0
    garbled.flush()
    with captured_log() as log:
        found = prepare(folder, again=True)
    assert np.array_equal(found.train[0][0], pixels(0).transpose(2, 0, 1))
    assert log.warnings == []


# --- content


def test_content_is_that_which_was_written(folder: Path) -> None:
    entry = prepare(folder).folder
    check_content(entry)
    with (entry / "test_labels.npy").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x01")
    assert prepare(folder).folder == entry  # a run looks at sizes only
    with pytest.raises(UnusableError, match=r"^test_labels.npy has not the content that was writ"):
        check_content(entry)


def test_content_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = prepare(folder).folder

    def refuse(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(seal, "_sha256", refuse)
    with pytest.raises(UsageError, match=r"cannot be read \(Input/output error\) and stays as it"):
        check_content(entry)


# --- odd places and names


def test_a_cache_in_the_home_of_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLSGD_CACHE", "~no-such-user/x")
    with pytest.raises(UsageError, match=r"the cache ~no-such-user/x has no place \(.*\); set BL"):
        cache_folder()


def test_a_cache_with_too_long_a_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / ("x" * 300)))
    with pytest.raises(UsageError, match=r"File name too long"):
        prepare(folder)


def test_file_names_that_are_not_utf8(tmp_path: Path, folder: Path) -> None:
    """They count for the state of the folder, but the library cannot read them."""
    first = prepare(folder).folder
    try:
        (folder / os.fsdecode(b"caf\xe9.txt")).write_text("notes")
    except OSError:
        pytest.skip("this disk takes no such names")
    assert prepare(folder).folder != first
    image = folder / "train" / "cat" / "00000.png"
    image.rename(image.with_name(os.fsdecode(b"caf\xe9.png")))
    with pytest.raises(UsageError, match=r"a file name is not UTF-8 \(.*caf.*; rename the file"):
        prepare(folder)


# --- rows that are left out


def test_first_rows_of_data_that_are_sorted_by_class(folder: Path) -> None:
    with captured_log() as log:
        prepared_images(CIFAR10, str(folder), max_samples=5)
    assert log.warnings == []
    with captured_log() as log:
        prepared_images(CIFAR10, str(folder), max_samples=4)
    assert log.warnings == ["max-samples = 4: the first images of train show 2 of its 3 classes"]


def test_labels_that_count_from_one_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = image_data.table_split

    def from_one(*arguments: Any) -> Any:
        split = real(*arguments)
        return image_data.ImageSplit(split.name, split.labels + 1, (), split.stored)

    monkeypatch.setattr(image_data, "table_split", from_one)
    with captured_log() as log:
        assert prepare(folder).class_names == ("0", "1", "2", "3")
    (line,) = log.warnings
    assert line.endswith(
        "no image of train has the label 0; there are 4 classes, and labels count from 0"
    )
