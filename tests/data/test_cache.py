"""Images prepared once, as arrays on disk."""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flower_blsgd.errors import UsageError

pytest.importorskip("datasets")

from flower_blsgd.data import cache as image_cache
from flower_blsgd.data.cache import cache_folder, prepared
from flower_blsgd.data.entry import FORMAT, Prepared
from flower_blsgd.data.image_data import prepared_images
from flower_blsgd.data.image_sets import CIFAR10
from flower_blsgd.data.preparation import Contents, OnItems, record_progress, scratch_folder
from flower_blsgd.data.source import DataSource

from ..log_capture import captured_log
from .image_files import (
    broken_jpeg,
    encoded,
    make_folders,
    make_parquet,
    pixels,
    png,
)

IMAGES = [png(k) for k in range(6)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "own")


def prepare(folder: Path, skip_bad: bool = False, again: bool = False) -> Prepared:
    return prepared_images(CIFAR10, str(folder), skip_bad=skip_bad, again=again)


def entries(cache: Path) -> list[str]:
    """Return the names in the cache but for the lock."""
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


# --- what comes out


def test_image_folders_come_out_as_they_are(folder: Path, cache: Path) -> None:
    images = prepare(folder)
    assert images.class_names == ("cat", "dog", "owl")
    assert images.train[1].tolist() == [0, 0, 1, 1, 2, 2]
    expected = [pixels(k).transpose(2, 0, 1) for k in (0, 3, 1, 4, 2, 5)]
    assert np.array_equal(images.train[0], np.stack(expected))
    expected = [pixels(1000 + k).transpose(2, 0, 1) for k in range(3)]
    assert np.array_equal(images.test[0], np.stack(expected))
    assert images.test[1].tolist() == [0, 1, 2]
    assert images.skipped == {"train": 0, "test": 0}
    assert entries(cache) == [images.folder.name]
    assert sorted(path.name for path in images.folder.iterdir()) == [
        "meta.json",
        *(f"{split}_{what}.npy" for split in ("test", "train") for what in ("images", "labels")),
    ]


def test_parquet_comes_out_as_it_is(tmp_path: Path) -> None:
    images = prepare(make_parquet(tmp_path / "own", IMAGES, IMAGES[:3]))
    assert images.class_names == ("0", "1", "2")
    expected = [pixels(k).transpose(2, 0, 1) for k in range(6)]
    assert np.array_equal(images.train[0], np.stack(expected))
    assert images.train[1].tolist() == [0, 1, 2, 0, 1, 2]


def test_arrays_may_be_written_without_changing_the_files(folder: Path) -> None:
    images = prepare(folder)
    for array in (*images.train, *images.test):
        assert isinstance(array, np.memmap)
        assert array.mode == "c"
        tensor = torch.from_numpy(array)  # does not warn
        tensor.zero_()
    again = prepare(folder)
    assert again.train[0].any()
    assert (again.train[0].dtype, again.train[1].dtype) == (np.uint8, np.int64)


def test_more_images_than_a_chunk(tmp_path: Path) -> None:
    count = 600
    numbered = [encoded(np.full((32, 32, 3), k % 251, np.uint8)) for k in range(count)]
    images = prepare(make_parquet(tmp_path / "own", numbered, IMAGES))
    assert images.train[0][:, 0, 0, 0].tolist() == [k % 251 for k in range(count)]
    assert images.train[1].tolist() == [k % 3 for k in range(count)]


def test_images_of_other_sizes_and_modes(tmp_path: Path) -> None:
    grey = np.full((32, 32), 77, np.uint8)
    large = np.full((64, 48, 3), (10, 20, 30), np.uint8)
    opaque = np.full((32, 32, 4), (1, 2, 3, 255), np.uint8)
    palette, ink = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (32, 32), (10, 20, 30)).quantize(2).save(palette, "PNG")
    Image.new("CMYK", (32, 32), (0, 0, 0, 255)).save(ink, "JPEG")
    coloured = [palette.getvalue(), ink.getvalue()]
    given = [encoded(grey), encoded(large), encoded(opaque), *coloured]
    with captured_log() as log:
        images = prepare(make_parquet(tmp_path / "own", given, IMAGES))
    assert np.array_equal(images.train[0][0], np.full((3, 32, 32), 77))
    assert images.train[0][1, :, 5, 5].tolist() == [10, 20, 30]
    assert images.train[0][2, :, 5, 5].tolist() == [1, 2, 3]
    assert images.train[0][3, :, 5, 5].tolist() == [10, 20, 30]
    assert images.train[0][4].max() <= 2  # black
    assert log.warnings == ["resized 1 images of train to 32x32"]


def test_resizing_is_bilinear(tmp_path: Path) -> None:
    board = np.zeros((64, 64, 3), np.uint8)
    board[::2, ::2] = 200  # each 2x2 block: one of 200 and three of 0
    images = prepare(make_parquet(tmp_path / "own", [encoded(board), png(1)], IMAGES))
    assert abs(int(images.train[0][0, 0, 10:20, 10:20].mean()) - 50) <= 5


def test_fingerprint_is_that_of_the_training_images(folder: Path, tmp_path: Path) -> None:
    expected = prepare(folder).fingerprint
    assert len(expected) == 16
    assert int(expected, 16) >= 0
    other_place = make_folders(tmp_path / "elsewhere")
    assert prepare(other_place).fingerprint == expected
    (other_place / "test" / "cat" / "00000.png").write_bytes(png(77))
    assert prepare(other_place).fingerprint == expected
    (other_place / "train" / "cat" / "00000.png").write_bytes(png(77))
    assert prepare(other_place).fingerprint != expected


# --- prepared once


def test_prepared_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(folder)
    with monkeypatch.context() as patch:
        patch.setattr(image_cache, "_prepare", None)
        second = prepare(folder)
    assert second.folder == first.folder
    assert second.fingerprint == first.fingerprint
    assert np.array_equal(second.train[0], first.train[0])


def test_prepared_again_on_request(folder: Path, cache: Path) -> None:
    first = prepare(folder)
    inode = first.folder.stat().st_ino
    with captured_log() as log:
        second = prepare(folder, again=True)
    assert second.folder == first.folder
    assert second.folder.stat().st_ino != inode
    assert np.array_equal(first.train[0], second.train[0])  # what is open stays readable
    assert entries(cache) == [first.folder.name]
    assert log.warnings == []


def test_opening_imports_no_library_for_reading(folder: Path) -> None:
    prepare(folder)
    code = f"""
import sys
from flower_blsgd.tasks import load_task
task = load_task("cifar10", {str(folder)!r})
print(task.num_train, [m for m in ("datasets", "pandas", "pyarrow", "PIL") if m in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code],
        check=True,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("6 []\n", "")


def test_preparing_says_one_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    images = prepare(folder)
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err == f"preparing 9 images of {folder}, once, in {images.folder}\n"
    prepare(folder)
    assert capfd.readouterr().err == ""


def test_preparing_shows_a_bar_in_a_terminal(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    prepare(folder)
    told = capfd.readouterr()
    assert told.out == ""
    assert "preparing 9 images of" in told.err
    assert "9/9" in told.err


def test_changed_files_are_prepared_anew(folder: Path, cache: Path) -> None:
    first = prepare(folder)
    (folder / "train" / "cat" / "00000.png").write_bytes(png(99))
    with captured_log() as log:
        second = prepare(folder)
    assert np.array_equal(second.train[0][0], pixels(99).transpose(2, 0, 1))
    assert entries(cache) == sorted([first.folder.name, second.folder.name])
    assert first.train[0][0].tolist() == np.load(first.folder / "train_images.npy")[0].tolist()
    assert log.warnings == [
        f"{folder} has changed; what was made of it before may be removed when no run uses it: "
        f"{first.folder}"
    ]


def test_other_folders_and_settings_stay(folder: Path, tmp_path: Path, cache: Path) -> None:
    prepare(folder)
    prepare(folder, skip_bad=True)
    prepare(make_folders(tmp_path / "other", train=4))
    (cache / "cifar10-somebodys-own").mkdir()
    with captured_log() as log:
        (folder / "train" / "cat" / "00000.png").write_bytes(png(99))
        prepare(folder)
    assert len(entries(cache)) == 5
    assert len(log.warnings) == 1


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("BLSGD_CACHE", "~/own")
    assert cache_folder() == Path("/home/ann/own")
    monkeypatch.setenv("BLSGD_CACHE", "")
    assert cache_folder() == Path("/caches/flower-blsgd")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/ann/.cache/flower-blsgd")


# --- damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def retype(path: Path) -> None:
    array = np.load(path)
    np.save(path, array.view(np.int8) if array.itemsize == 1 else array.view(np.uint64))


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("train_images.npy", truncate, "18559 bytes instead of 18560"),
        ("test_labels.npy", truncate, "151 bytes instead of 152"),
        ("test_images.npy", lengthen, "bytes instead of"),
        ("train_images.npy", empty, "0 bytes instead of"),
        ("train_labels.npy", Path.unlink, "train_labels.npy is missing"),
        ("train_images.npy", retype, "train_images.npy is int8 (6, 3, 32, 32)"),
        ("test_labels.npy", retype, "test_labels.npy is uint64 (3,)"),
        ("meta.json", Path.unlink, "meta.json is missing"),
        ("meta.json", halve, ""),
        ("meta.json", lambda path: path.write_text("{}"), "'format'"),
        ("meta.json", lambda path: path.write_text("[]"), ""),
        ("meta.json", lambda path: path.write_text(f'{{"format": {FORMAT}}}'), "'files'"),
    ],
)
def test_damaged_entry_is_told_and_made_again(
    folder: Path, cache: Path, name: str, damage: object, told: str
) -> None:
    expected = np.array(prepare(folder).train[0])
    entry = cache / entries(cache)[0]
    damage(entry / name)  # type: ignore[operator]
    with captured_log() as log:
        images = prepare(folder)
        prepare(folder)
    assert np.array_equal(images.train[0], expected)
    (line,) = log.warnings
    assert line.startswith(f"{entry} is damaged (")
    assert line.endswith("); preparing it again")
    assert told in line
    assert entries(cache) == [entry.name]


def test_file_in_the_way_of_an_entry(folder: Path, cache: Path) -> None:
    entry = prepare(folder).folder
    for path in entry.iterdir():
        path.unlink()
    entry.rmdir()
    entry.write_text("not a folder")
    assert len(prepare(folder).train[0]) == 6
    assert entries(cache) == [entry.name]


def test_leftovers_are_removed(folder: Path, cache: Path) -> None:
    (cache / ".part.cifar10.123" / "source").mkdir(parents=True)
    (cache / ".part.cifar10.123" / "train_images.npy").write_bytes(b"half")
    (cache / ".part.other.123").mkdir()
    entry = prepare(folder).folder
    assert entries(cache) == [".part.other.123", entry.name]


@pytest.mark.parametrize(
    ("number", "told"), [(errno.ENOSPC, "No space left on device"), (errno.EFBIG, "File too large")]
)
def test_full_disk(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full, raising=False)
        with pytest.raises(UsageError) as refused:
            prepare(folder)
    assert str(refused.value) == (
        f"the cache {cache} cannot be written ({told}); make room, or set BLSGD_CACHE to another "
        "folder; the next start goes on with what is done"
    )
    (left,) = entries(cache)
    assert left.startswith(".part.cifar10.")  # the next one goes on with it
    with captured_log() as log:
        entry = prepare(folder).folder
    assert log.warnings == []  # nothing was decoded
    assert entries(cache) == [entry.name]


def test_disk_that_is_full_in_the_middle(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training images are there when there is no room for the test images."""
    reserve = os.posix_fallocate
    asked: list[int] = []

    def full(file: int, first: int, length: int) -> None:
        asked.append(length)
        if len(asked) == 3:  # after the training images and labels
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, first, length)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UsageError, match="No space left on device"):
            prepare(folder)
    with captured_log() as log:
        images = prepare(folder)
    assert log.warnings == [f"going on with the images of {folder} at 6 of 9"]
    assert np.array_equal(images.train[0][1], pixels(3).transpose(2, 0, 1))
    assert np.array_equal(images.test[0][2], pixels(1002).transpose(2, 0, 1))
    assert entries(cache) == [images.folder.name]


def test_cache_that_cannot_be_made(folder: Path, tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file in its place")
    with pytest.raises(UsageError, match=r"the cache .* cannot be written \(File exists\)"):
        prepare(folder)


def test_cache_inside_the_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLSGD_CACHE", str(folder / "cache"))
    with pytest.raises(UsageError, match="lies inside it; set BLSGD_CACHE"):
        prepare(folder)


# --- entries of other versions


def say_format(entry: Path, number: int) -> None:
    meta = json.loads((entry / "meta.json").read_text())
    (entry / "meta.json").write_text(json.dumps({**meta, "format": number}))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_entry_of_another_version_stays(folder: Path, cache: Path) -> None:
    """Its name is another one, since the format is a part of it."""
    entry = prepare(folder).folder
    other = entry.rename(cache / "cifar10-0123456789abcdef")
    say_format(other, 1)
    before = contents(other)
    with captured_log() as log:
        assert prepare(folder).folder == entry
        prepare(folder)
    assert log.warnings == [
        f"{other} was prepared by another version of flower-blsgd and stays as it is; preparing "
        f"{folder} anew in {entry}"
    ]
    assert contents(other) == before


def test_entry_of_another_version_in_our_place_stays(folder: Path, cache: Path) -> None:
    other = prepare(folder).folder
    for said in ({}, {"source": "elsewhere"}):
        (other / "meta.json").write_text(json.dumps({**said, "format": 99}))
        before = contents(other)
        with captured_log() as log:
            ours = prepare(folder, again=True).folder
        assert ours.name == f"{other.name}-format-{FORMAT}"
        assert log.warnings == [
            f"{other} was prepared by another version of flower-blsgd and stays as it is; "
            f"preparing {folder} anew in {ours}"
        ]
        assert contents(other) == before
        with captured_log() as log:
            assert prepare(folder).folder == ours
        assert log.warnings == []
    assert len(entries(cache)) == 2


# --- what a preparation may leave beside the arrays


class Numbers:
    """A preparation of a few numbers, with more than inputs and labels."""

    name, noun = "numbers", "numbers"
    source = DataSource("hub/numbers")
    options: Mapping[str, Any] = {"count": 3}

    def write(self, part: Path, on_items: OnItems) -> Contents:
        on_items.begin(6)
        for split in ("train", "test"):
            np.save(part / f"{split}_numbers.npy", np.arange(3, dtype=np.int32))
            np.save(part / f"{split}_labels.npy", np.arange(3))
            np.save(part / f"{split}_lengths.npy", np.array([5, 6, 7]))
            on_items(3)
        (part / "words").mkdir(exist_ok=True)
        (part / "words" / "list.txt").write_text("one two")
        scratch_folder(part).mkdir(exist_ok=True)
        record_progress(part, {"train": 3})
        return Contents("numbers", ("a", "b", "c"), {"train": 1}, {"longest": 7})


def test_preparation_of_something_else(cache: Path) -> None:
    numbers = prepared(Numbers())
    assert numbers.train[0].tolist() == numbers.test[0].tolist() == [0, 1, 2]
    assert numbers.train[0].dtype == np.int32
    assert numbers.array("test_lengths").tolist() == [5, 6, 7]
    assert (numbers.class_names, numbers.skipped) == (("a", "b", "c"), {"train": 1})
    assert (numbers.facts, numbers.noun) == ({"longest": 7}, "numbers")
    assert sorted(path.name for path in numbers.folder.iterdir()) == [
        "meta.json",
        *(
            f"{s}_{what}.npy"
            for s in ("test", "train")
            for what in ("labels", "lengths", "numbers")
        ),
        "words",
    ]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("words/list.txt", "list.txt has 8 bytes instead of 7"),
        ("train_lengths.npy", "train_lengths.npy has"),
    ],
)
def test_damage_of_what_lies_beside_is_seen(cache: Path, name: str, told: str) -> None:
    lengthen(prepared(Numbers()).folder / name)
    with captured_log() as log:
        assert prepared(Numbers()).array("train_lengths").tolist() == [5, 6, 7]
    (line,) = log.warnings
    assert told in line


# --- images that cannot be read


def test_bad_image_is_refused(tmp_path: Path, cache: Path) -> None:
    given = [*IMAGES[:4], broken_jpeg(), b"no image", *IMAGES]
    folder = make_parquet(tmp_path / "own", given, IMAGES)
    with pytest.raises(UsageError) as refused:
        prepare(folder)
    assert str(refused.value).startswith("data: image 4 of train cannot be decoded (")
    assert str(refused.value).endswith("); skip-bad = true leaves such images out")
    assert entries(cache) == []


def test_bad_image_is_named_by_its_file(folder: Path) -> None:
    bad = folder / "test" / "dog" / "00001.png"
    bad.write_bytes(b"no image")
    with pytest.raises(UsageError) as refused:
        prepare(folder)
    assert str(refused.value) == (
        f"data: image 1 of test cannot be decoded (cannot identify image file, {bad}); "
        "skip-bad = true leaves such images out"
    )


def test_bad_images_are_left_out(tmp_path: Path) -> None:
    given = [broken_jpeg(), *IMAGES[:4], b"no image", *IMAGES[4:], None]
    folder = make_parquet(tmp_path / "own", given, IMAGES)
    with captured_log() as log:
        images = prepare(folder, skip_bad=True)
    assert images.train[1].tolist() == [1, 2, 0, 1, 0, 1]  # of places 1, 2, 3, 4, 6, 7
    expected = [pixels(k).transpose(2, 0, 1) for k in range(6)]
    assert np.array_equal(images.train[0], np.stack(expected))
    assert images.skipped == {"train": 3, "test": 0}
    assert log.warnings == ["left out 3 of 9 images of train that cannot be decoded"]
    meta = json.loads((images.folder / "meta.json").read_text())
    assert meta["skipped"] == {"train": 3, "test": 0}
    assert not list(images.folder.glob("*.kept"))
    with captured_log() as log:
        assert prepare(folder, skip_bad=True).skipped == {"train": 3, "test": 0}
    assert log.warnings == []


def test_left_out_images_are_not_there_without_the_setting(tmp_path: Path) -> None:
    folder = make_parquet(tmp_path / "own", [*IMAGES, b"no image"], IMAGES)
    prepare(folder, skip_bad=True)
    with pytest.raises(UsageError, match="image 6 of train"):
        prepare(folder)


def test_no_good_image_at_all(tmp_path: Path) -> None:
    folder = make_parquet(tmp_path / "own", [b"bad", b"worse"], IMAGES)
    with pytest.raises(UsageError, match="none of the 2 images of train can be decoded"):
        prepare(folder, skip_bad=True)


def test_class_names_must_be_those_of_both_parts(tmp_path: Path) -> None:
    labels = {"train": [0, 1], "test": [0, 5]}
    images = prepare(make_parquet(tmp_path / "own", IMAGES[:2], IMAGES[:2], labels=labels))
    assert images.class_names == ("0", "1", "2", "3", "4", "5")
