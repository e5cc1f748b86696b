"""Several processes that prepare the same images, and one that is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")

from flower_blsgd.data.cache import prepared

from ..runtime.processes import wait_until
from .image_files import make_folders

pytestmark = pytest.mark.processes

# Decodes slowly, so that others come or a signal comes in the middle.
CODE = """
import sys, time
from flower_blsgd.data import cache as image_cache, image_decoding
decode = image_decoding._decoded
def slowly(encoded):
    time.sleep(float(sys.argv[2]))
    return decode(encoded)
image_decoding._decoded = slowly
images = image_cache.prepared("cifar10", sys.argv[1], False)
print(images.fingerprint, len(images.train[0]), images.folder.name)
"""


def start(folder: Path, cache: Path, seconds_per_image: float) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder), str(seconds_per_image)],
        env={**os.environ, "BLSGD_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_of_two_processes_one_prepares(tmp_path: Path) -> None:
    folder, cache = make_folders(tmp_path / "own", train=40), tmp_path / "cache"
    started = [start(folder, cache, 0.05) for _ in range(2)]
    told = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert told[0][0] == told[1][0]
    errors = "".join(error for _, error in told)
    assert errors.count("preparing 43 images") == 1
    assert errors.count("waiting for another process") <= 1
    (entry,) = [path.name for path in cache.iterdir() if not path.name.startswith(".")]
    assert told[0][0].split() == [told[0][0].split()[0], "40", entry]


def test_killed_preparation_is_never_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = make_folders(tmp_path / "own"), tmp_path / "cache"
    process = start(folder, cache, 60)

    def parts() -> list[Path]:
        return list(cache.glob(".part.cifar10.*/train_images.npy"))

    try:
        assert wait_until(parts)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert parts()  # it left something behind
    monkeypatch.setenv("BLSGD_CACHE", str(cache))
    images = prepared("cifar10", str(folder), False)
    assert len(images.train[0]) == 6
    assert images.train[0].reshape(6, -1).any(axis=1).all()
    left = [path.name for path in cache.iterdir() if not path.name.endswith(".lock")]
    assert left == [images.folder.name]


def test_interrupted_preparation_cleans_up(tmp_path: Path) -> None:
    folder, cache = make_folders(tmp_path / "own"), tmp_path / "cache"
    process = start(folder, cache, 0.3)
    assert wait_until(lambda: list(cache.glob(".part.cifar10.*/train_images.npy")))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode not in (0, None)
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []
