"""Data prepared once: what an entry holds, what is damaged, several processes, kills."""

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from flower_blsgd.data.cache import (
    Prepared,
    UnusableError,
    Write,
    cache_folder,
    open_entry,
    prepared,
)
from flower_blsgd.data.source import DataSource
from flower_blsgd.errors import UsageError

from ..log_capture import captured_log
from ..refusal import refusal

Damage = Callable[[Path], object]

HF_HUB = DataSource(name="numbers", hf_hub_name="hub/x", noun="texts")


def write_numbers(folder: Path, scratch: Path) -> Mapping[str, Any]:
    """Write three numbers for each part, with a file beside and what a library leaves."""
    for part, first in (("train", 0), ("test", 10)):
        np.save(folder / f"{part}_inputs.npy", np.arange(first, first + 6, dtype=np.int32))
        np.save(folder / f"{part}_labels.npy", np.arange(3))
    (folder / "words.txt").write_text("one two")
    scratch.mkdir()
    (scratch / "table.arrow").write_text("of a library")
    return {"num_classes": 3, "skipped": {"train": 1}, "vocabulary": 7}


def refuse(*_: object) -> Any:
    raise AssertionError("must not be called")


def numbers(
    write: Write = write_numbers, source: DataSource = HF_HUB, again: bool = False, count: int = 3
) -> Prepared:
    return prepared(source, {"count": count}, write, again)


def entries(cache: Path) -> list[str]:
    """Return the names in the cache but for the lock."""
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


# --- an entry


def test_what_is_prepared(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = numbers()
    line = f"preparing the texts of the HF hub's hub/x (once) in {found.folder}\n"
    assert capfd.readouterr() == ("", line)
    torch.from_numpy(numbers().train[0]).zero_()  # does not warn, nor change the file
    assert capfd.readouterr() == ("", "")
    assert found.train[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.test[0].tolist() == [10, 11, 12, 13, 14, 15]
    assert (found.train[0].dtype, found.train[1].dtype) == (np.int32, np.int64)
    assert found.test[1].tolist() == [0, 1, 2]
    assert (found.noun, found.num_classes, found.vocabulary) == ("texts", 3, 7)
    assert found.skipped == {"train": 1}
    assert entries(cache) == [found.folder.name]
    assert len(list(found.folder.iterdir())) == 6  # four arrays, words and the manifest
    open_entry(found.folder, content=True)


def test_it_is_prepared_once_unless_asked_again(cache: Path) -> None:
    first = numbers()
    second = numbers(refuse)
    assert (second.folder, second.fingerprint) == (first.folder, first.fingerprint)
    inode = first.folder.stat().st_ino
    with captured_log() as log:
        third = numbers(again=True)
    assert (third.folder, log.warnings) == (first.folder, [])
    assert third.folder.stat().st_ino != inode
    assert first.train[0].tolist() == third.train[0].tolist()  # what is open stays readable
    assert entries(cache) == [first.folder.name]


def test_fingerprint_is_that_of_the_training_samples() -> None:
    def changed(array: str) -> str:
        def write(folder: Path, scratch: Path) -> Mapping[str, Any]:
            facts = write_numbers(folder, scratch)
            np.save(folder / f"{array}.npy", np.load(folder / f"{array}.npy") + 1)
            return facts

        return numbers(write, again=True).fingerprint

    same = numbers().fingerprint
    assert (len(same), int(same, 16) >= 0) == (16, True)
    assert changed("test_inputs") == changed("test_labels") == same
    assert len({same, changed("train_inputs"), changed("train_labels")}) == 3


def test_other_options_and_changed_files_make_other_entries(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "own").mkdir()
    folder = replace(HF_HUB, data=str(tmp_path / "own"))
    first = numbers(source=folder)
    numbers()
    numbers(source=folder, count=4)
    (tmp_path / "own" / "more.txt").write_text("2")
    assert numbers(source=folder).folder != first.folder
    assert len(entries(cache)) == 4
    message = refusal(numbers, source=replace(HF_HUB, data=str(tmp_path)))
    assert message.endswith(f"the cache {cache} lies inside it; set BLSGD_CACHE to another folder")


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


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train_inputs.npy", lambda path: os.truncate(path, path.stat().st_size - 1)),
        ("train_labels.npy", lambda path: path.write_bytes(bytes(152))),
        ("manifest.json", lambda path: path.write_text("{}")),
    ],
)
def test_a_damaged_entry_is_named_and_made_again(cache: Path, name: str, damage: Damage) -> None:
    entry = numbers().folder
    damage(entry / name)
    with pytest.raises(UnusableError):
        open_entry(entry, content=True)
    with captured_log() as log:
        assert numbers().train[0].tolist() == [0, 1, 2, 3, 4, 5]
        numbers(refuse)
    (line,) = log.warnings
    assert line.startswith(f"{entry} is damaged (")
    assert line.endswith("); preparing it again")
    assert entries(cache) == [entry.name]
    open_entry(entry, content=True)


def test_content_is_compared_only_on_request() -> None:
    entry = numbers().folder
    with (entry / "test_labels.npy").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x01")
    assert numbers(refuse).folder == entry  # a run looks at sizes only
    with pytest.raises(UnusableError, match=r"^test_labels.npy: size or checksum mismatch"):
        open_entry(entry, content=True)


# --- preparations that fail


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "disk full"), UsageError("bad row"), KeyboardInterrupt()]
)
def test_an_interrupted_preparation_leaves_nothing(
    cache: Path, error: BaseException, again: bool
) -> None:
    def write(folder: Path, scratch: Path) -> Mapping[str, Any]:
        write_numbers(folder, scratch)
        raise error

    kept = [numbers().folder.name] if again else []
    if isinstance(error, OSError):
        message = refusal(numbers, write, again=again)
        assert message.startswith(f"the cache {cache} cannot be used ([Errno 28] disk full); free ")
        assert message.endswith("or set BLSGD_CACHE to another folder")
    else:
        with pytest.raises(type(error)):
            numbers(write, again=again)
    assert entries(cache) == kept
    assert len(numbers(refuse if again else write_numbers).train[1]) == 3


def test_a_cache_without_locks_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network disks; another process may be preparing the same data."""
    others = cache / ".part.numbers.of-another-process"
    others.mkdir(parents=True)
    unsupported = OSError(errno.ENOTSUP, "Operation not supported")
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=unsupported))
    monkeypatch.setattr("os.fsync", Mock(side_effect=unsupported))
    assert len(numbers().train[1]) == 3
    assert others.is_dir()


def test_a_cache_that_cannot_be_made_or_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file in its place")
    assert "cannot be used ([Errno 17] File exists" in refusal(numbers)
    cache.unlink()
    entry = numbers().folder
    monkeypatch.setattr(np, "load", Mock(side_effect=OSError(errno.EMFILE, "too many")))
    assert f"{entry} cannot be read ([Errno 24] too many)" in refusal(numbers, refuse)


# --- several processes

# Prepares in the time that it takes to read a line; prints what it found, and whether it wrote.
CODE = """
import sys
import numpy as np
from flower_blsgd.data.cache import prepared
from flower_blsgd.data.source import DataSource

wrote = []

def write(folder, scratch):
    for name in ("train_inputs", "train_labels", "test_inputs", "test_labels"):
        np.save(folder / f"{name}.npy", np.arange(3))
        if not wrote:
            print("writes", flush=True)
            sys.stdin.readline()
        wrote.append(name)
    return {"num_classes": 3, "skipped": {}}

source = DataSource(name="numbers", hf_hub_name="hub/x")
found = prepared(source, {}, write)
print(found.folder.name, len(found.train[0]), len(wrote))
"""


@pytest.mark.processes
def test_of_two_processes_one_goes_on_after_a_kill(cache: Path) -> None:
    """What a killed one left is removed, but not that of another data set, which may be locked."""
    other = cache / ".part.numbers100.123"
    other.mkdir(parents=True)
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with contextlib.ExitStack() as stack:

        def start() -> Any:
            command = [sys.executable, "-c", CODE]
            process = stack.enter_context(subprocess.Popen(command, **pipes, text=True))
            stack.callback(process.kill)
            return process

        killed = start()
        assert killed.stdout.readline() == "writes\n"
        waiting = [start(), start()]
        for process in waiting:
            assert "waiting for another process that prepares numbers" in process.stderr.readline()
        assert [name[:14] for name in entries(cache)] == [".part.numbers.", other.name[:14]]
        killed.kill()
        for process in waiting:  # either may be the one that goes on
            process.stdin.write("\n")
            process.stdin.flush()
        results = [process.communicate(timeout=120)[0] for process in waiting]
    left, entry = entries(cache)
    assert left == other.name
    shown = sorted(result.splitlines()[-1] for result in results)
    assert shown == [f"{entry} 3 0", f"{entry} 3 4"]
