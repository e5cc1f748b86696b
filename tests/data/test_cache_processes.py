"""Several processes that prepare the same images, and some that are killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")

from flower_blsgd.data.image_data import prepared_images
from flower_blsgd.data.image_sets import CIFAR10
from flower_blsgd.data.image_split import JoinedSplit
from flower_blsgd.data.preparation import read_progress

from ..log_capture import captured_log
from ..runtime.processes import wait_until
from .image_files import make_folders, pixels, png

pytestmark = pytest.mark.processes

# Chunks of 4 images, each recorded. Takes its time with each, so that others come in the middle,
# or stops for good before a row, until it is killed or interrupted. Writes how many images it
# looked at.
CODE = """
import json, signal, sys, threading, time
from flower_blsgd.data import image_data, image_decoding, image_sets
from flower_blsgd.data.image_split import JoinedSplit

folder, seconds, last_row = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
image_decoding._LARGEST_CHUNK = 4
image_decoding._SECONDS_BETWEEN_RECORDS = 0
read, gone, stored = [], threading.Event(), JoinedSplit.stored

def interrupted(*_):
    gone.set()
    raise KeyboardInterrupt

def slowly(self, first, last):
    time.sleep(seconds)
    if last > last_row:
        gone.wait()
    read.append(last - first)
    return stored(self, first, last)

signal.signal(signal.SIGINT, interrupted)
JoinedSplit.stored = slowly
images = image_data.prepared_images(image_sets.CIFAR10, folder)
print(images.fingerprint, len(images.train[0]), images.folder.name, sum(read))
"""

ALL = 1_000_000


def start(
    folder: Path, cache: Path, seconds: float = 0, last_row: int = ALL
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder), str(seconds), str(last_row)],
        env={**os.environ, "BLSGD_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop_in_the_middle(folder: Path, cache: Path, how: signal.Signals) -> Path:
    """End a preparation when 12 training images are done, and return what it left."""
    process = start(folder, cache, last_row=12)

    def parts() -> list[Path]:
        parts = list(cache.glob(".part.cifar10.*"))
        return [p for p in parts if read_progress(p).get("train", {}).get("done") == 12]

    try:
        assert wait_until(parts)
    finally:
        process.send_signal(how)
        process.communicate(timeout=60)
    assert process.returncode != 0
    (part,) = parts()
    return part


def test_of_two_processes_one_prepares(tmp_path: Path) -> None:
    folder, cache = make_folders(tmp_path / "own", train=40), tmp_path / "cache"
    started = [start(folder, cache, seconds=0.2) for _ in range(2)]
    told = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert told[0][0].split()[:3] == told[1][0].split()[:3]
    assert sorted(int(out.split()[3]) for out, _ in told) == [0, 43]
    errors = "".join(error for _, error in told)
    assert errors.count("preparing 43 images") == 1
    assert errors.count("waiting for another process") <= 1
    (entry,) = [path.name for path in cache.iterdir() if not path.name.startswith(".")]
    assert told[0][0].split()[1:3] == ["40", entry]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_next_one_goes_on_with_what_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    folder, cache = make_folders(tmp_path / "own", train=40), tmp_path / "cache"
    part = stop_in_the_middle(folder, cache, how)
    assert [path for path in cache.iterdir() if not path.name.startswith(".")] == []
    read: list[tuple[str, int, int]] = []
    stored = JoinedSplit.stored

    def noting(self: JoinedSplit, first: int, last: int) -> Any:
        read.append((self.name, first, last))
        return stored(self, first, last)

    monkeypatch.setattr(JoinedSplit, "stored", noting)
    monkeypatch.setenv("BLSGD_CACHE", str(cache))
    with captured_log() as log:
        images = prepared_images(CIFAR10, str(folder))
    assert log.warnings == [f"going on with the images of {folder} at 12 of 43"]
    assert read == [("train", 12, 40), ("test", 0, 3)]
    left = [path.name for path in cache.iterdir() if not path.name.endswith(".lock")]
    assert left == [images.folder.name]
    assert part.name == f".part.cifar10.{images.folder.name.removeprefix('cifar10-')}"
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "other"))
    in_one_go = prepared_images(CIFAR10, str(folder))
    assert in_one_go.fingerprint == images.fingerprint
    for one, other in zip(images.test, in_one_go.test, strict=True):
        assert np.array_equal(one, other)


def test_killed_preparation_is_never_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left of files that are no longer the same is not looked at."""
    folder, cache = make_folders(tmp_path / "own", train=40), tmp_path / "cache"
    stop_in_the_middle(folder, cache, signal.SIGKILL)
    (folder / "train" / "cat" / "00000.png").write_bytes(png(99))
    monkeypatch.setenv("BLSGD_CACHE", str(cache))
    with captured_log() as log:
        images = prepared_images(CIFAR10, str(folder))
    assert log.warnings == []
    assert np.array_equal(images.train[0][0], pixels(99).transpose(2, 0, 1))
    assert images.train[0].reshape(40, -1).any(axis=1).all()
    left = [path.name for path in cache.iterdir() if not path.name.endswith(".lock")]
    assert left == [images.folder.name]
