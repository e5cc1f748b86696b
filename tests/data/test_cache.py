"""Data prepared once: what an entry holds, what is damaged, full disks, other versions."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_blsgd.data import cache as cache_module
from flower_blsgd.data.cache import (
    FORMAT,
    SCRATCH,
    Contents,
    OnItems,
    Preparation,
    UnusableError,
    cache_folder,
    check_content,
    new_array,
    prepared,
)
from flower_blsgd.data.source import DataSource
from flower_blsgd.errors import UsageError

from ..log_capture import captured_log
from ..refusal import refusal

Damage = Callable[[Path], object]


def write_numbers(folder: Path, on_items: OnItems) -> Contents:
    """Write three numbers for each split, with a folder beside and what a library left."""
    for split, first in (("train", 0), ("test", 10)):
        numbers = new_array(folder / f"{split}_numbers.npy", (3, 2), np.int32)
        numbers[:] = first + np.arange(6).reshape(3, 2)
        numbers.flush()
        np.save(folder / f"{split}_labels.npy", np.arange(3))
        on_items(3, 6)
    (folder / "words.txt").write_text("one two")
    (folder / SCRATCH).mkdir()
    (folder / SCRATCH / "table.arrow").write_text("of a library")
    return Contents("numbers", ("a", "b", "c"), {"train": 1}, {"longest": 7})


NUMBERS = Preparation("numbers", DataSource("hub/x", noun="numbers"), {"count": 3}, write_numbers)
FILES = [
    "meta.json",
    "test_labels.npy",
    "test_numbers.npy",
    "train_labels.npy",
    "train_numbers.npy",
    "words.txt",
]


@pytest.fixture
def source(tmp_path: Path) -> DataSource:
    """Return a source that is a folder with one file."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "data.txt").write_text("1")
    return DataSource("hub/x", tmp_path / "own", noun="numbers")


def entries(cache: Path) -> list[str]:
    """Return the names in the cache but for the lock."""
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def refuse(*_: object, **__: object) -> Any:
    raise AssertionError("must not be called")


# --- an entry


def test_what_is_prepared(cache: Path) -> None:
    numbers = prepared(NUMBERS)
    torch.from_numpy(prepared(NUMBERS).train[0]).zero_()  # does not warn, nor change the file
    assert numbers.train[0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert numbers.test[0].tolist() == [[10, 11], [12, 13], [14, 15]]
    assert numbers.train[0].dtype == np.int32
    assert numbers.train[1].dtype == np.int64
    assert numbers.test[1].tolist() == [0, 1, 2]
    assert (numbers.class_names, numbers.skipped) == (("a", "b", "c"), {"train": 1})
    assert (numbers.facts, numbers.noun) == ({"longest": 7}, "numbers")
    assert entries(cache) == [numbers.folder.name]
    assert sorted(path.name for path in numbers.folder.iterdir()) == FILES
    check_content(numbers.folder)


def test_it_is_prepared_once_unless_asked_again(cache: Path) -> None:
    first = prepared(NUMBERS)
    second = prepared(replace(NUMBERS, write=refuse))
    assert (second.folder, second.fingerprint) == (first.folder, first.fingerprint)
    inode = first.folder.stat().st_ino
    with captured_log() as log:
        third = prepared(NUMBERS, again=True)
    assert (third.folder, log.warnings) == (first.folder, [])
    assert third.folder.stat().st_ino != inode
    assert first.train[0].tolist() == third.train[0].tolist()  # what is open stays readable
    assert entries(cache) == [first.folder.name]


def test_fingerprint_is_that_of_the_training_samples() -> None:
    def changed(array: str) -> str:
        def write(folder: Path, on_items: OnItems) -> Contents:
            contents = write_numbers(folder, on_items)
            if array:
                values = np.load(folder / f"{array}.npy")
                np.save(folder / f"{array}.npy", values + 1)
            return contents

        return prepared(replace(NUMBERS, options={"array": array}, write=write)).fingerprint

    same = changed("")
    assert (len(same), int(same, 16) >= 0) == (16, True)
    assert changed("test_numbers") == changed("test_labels") == same
    assert len({same, changed("train_numbers"), changed("train_labels")}) == 3


def test_opening_imports_no_library_for_reading() -> None:
    code = """
import sys
import flower_blsgd.tasks
from flower_blsgd.data import image_data, text_data
libraries = ("datasets", "pandas", "pyarrow", "PIL", "torch", "transformers")
print([name for name in libraries if name in sys.modules])
"""
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_preparing_says_one_line_and_shows_a_bar_in_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = prepared(NUMBERS).folder
    line = f"preparing the numbers of the HF hub's hub/x, once, in {entry}\n"
    assert capfd.readouterr() == ("", line)
    prepared(NUMBERS)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    prepared(NUMBERS, again=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert "6/6" in err


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("BLSGD_CACHE", "~/own")
    assert cache_folder() == Path("/home/ann/own")
    monkeypatch.setenv("BLSGD_CACHE", "")
    assert cache_folder() == Path("/caches/flower-blsgd")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/ann/.cache/flower-blsgd")
    monkeypatch.setenv("BLSGD_CACHE", "~no-such-user/x")
    assert refusal(cache_folder).endswith("; set BLSGD_CACHE to another folder")


# --- other sources, options and versions


def test_other_options_and_changed_files_make_other_entries(
    cache: Path, source: DataSource
) -> None:
    of_folder = replace(NUMBERS, source=source)
    first = prepared(of_folder)
    for other in (NUMBERS, replace(of_folder, options={"count": 4})):
        prepared(other)
    (Path(str(source)) / "more.txt").write_text("2")
    assert prepared(of_folder).folder != first.folder
    assert len(entries(cache)) == 4


# --- damage


@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        (
            "train_numbers.npy",
            lambda path: os.truncate(path, path.stat().st_size - 1),
            "train_numbers.npy has 151 bytes instead of 152",
        ),
        ("train_labels.npy", Path.unlink, "train_labels.npy is missing"),
        ("train_labels.npy", lambda path: path.write_bytes(bytes(152)), ""),
        ("meta.json", Path.unlink, "meta.json is missing"),
        ("meta.json", lambda path: path.write_text(f'{{"format": {FORMAT}}}'), "'files'"),
    ],
)
def test_a_damaged_entry_is_named_and_made_again(
    cache: Path, name: str, damage: Damage, why: str
) -> None:
    entry = prepared(NUMBERS).folder
    damage(entry / name)
    with captured_log() as log:
        numbers = prepared(NUMBERS)
        prepared(replace(NUMBERS, write=refuse))
    assert numbers.train[0].tolist() == [[0, 1], [2, 3], [4, 5]]
    (line,) = log.warnings
    assert line.startswith(f"{entry} is damaged (")
    assert line.endswith("); preparing it again")
    assert why in line
    assert entries(cache) == [entry.name]
    check_content(entry)


def test_content_is_compared_only_on_request() -> None:
    entry = prepared(NUMBERS).folder
    with (entry / "test_labels.npy").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x01")
    assert prepared(NUMBERS).folder == entry  # a run looks at sizes only
    with pytest.raises(UnusableError, match=r"^test_labels.npy has not the content that was writ"):
        check_content(entry)


def test_an_entry_that_cannot_be_read_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = prepared(NUMBERS).folder
    inode = entry.stat().st_ino

    def fail(path: Path, **_: object) -> None:
        raise OSError(errno.EIO, "disk error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "_sha256", fail)
        patch.setattr(np, "load", fail)
        for call in (lambda: prepared(NUMBERS), lambda: check_content(entry)):
            assert refusal(call).startswith(f"{entry} cannot be read (disk error) and stays as it")
    assert entries(cache) == [entry.name]
    assert prepared(NUMBERS).folder.stat().st_ino == inode


# --- preparations that fail


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("where", "number"),
    [("posix_fallocate", errno.ENOSPC), ("fsync", errno.EIO)],
)
def test_a_full_or_broken_disk_leaves_nothing_half_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int, again: bool
) -> None:
    kept = [prepared(NUMBERS).folder.name] if again else []
    real, calls = getattr(os, where), []

    def fail_later(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:  # the first array is written
            raise OSError(number, os.strerror(number))
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, where, fail_later)
        assert refusal(lambda: prepared(NUMBERS, again)) == (
            f"the cache {cache} cannot be written ({os.strerror(number)}); make room, or set "
            "BLSGD_CACHE to another folder"
        )
    assert entries(cache) == kept
    assert len(prepared(NUMBERS).train[0]) == 3


@pytest.mark.parametrize("error", [UsageError, KeyboardInterrupt])
def test_an_interrupted_preparation_leaves_nothing(cache: Path, error: type[BaseException]) -> None:
    def write(folder: Path, on_items: OnItems) -> Contents:
        write_numbers(folder, on_items)
        raise error("in the middle")

    with pytest.raises(error, match="in the middle"):
        prepared(replace(NUMBERS, write=write))
    assert entries(cache) == []


def test_what_a_killed_preparation_left_is_removed(cache: Path) -> None:
    """But not that of another data set, whose lock another process may hold."""
    (cache / ".part.numbers.123" / "source").mkdir(parents=True)
    (cache / ".part.numbers.123" / "train_numbers.npy").write_bytes(b"half")
    (cache / ".part.numbers100.123").mkdir()
    entry = prepared(NUMBERS).folder
    assert entries(cache) == [".part.numbers100.123", entry.name]


def test_a_cache_that_cannot_be_made(
    tmp_path: Path, cache: Path, source: DataSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file in its place")
    assert "cannot be written (File exists); make room, or set BLSGD_CACHE" in refusal(
        lambda: prepared(NUMBERS)
    )
    monkeypatch.setenv("BLSGD_CACHE", f"{source}/cache")
    message = refusal(lambda: prepared(replace(NUMBERS, source=source)))
    assert message.startswith(f"{source.setting}: the cache {source}/cache lies inside it; set BLS")
