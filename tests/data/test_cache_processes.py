"""Several processes that prepare the same data, and some that are killed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("datasets")

from flower_blsgd.data.image_data import CIFAR10, prepared_images

from .image_files import make_folders, pixels

pytestmark = pytest.mark.processes

# Prepares in chunks of 4 images, slowly, so that others come in the middle; or says before a row
# that it waits to be killed. Prints how many images it decoded itself.
CODE = """
import sys, time
from dataclasses import replace
from flower_blsgd.data import image_data, image_decoding

folder, seconds, last_row = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
image_decoding._LARGEST_CHUNK = 4
decoded, join = [], image_data.join_splits

def slow(splits, max_samples):
    whole = join(splits, max_samples)

    def stored(first, last):
        time.sleep(seconds)
        if last > last_row:
            sys.stdout.write("waits\\n")
            sys.stdout.flush()
            time.sleep(600)
        decoded.append(last - first)
        return whole.stored(first, last)

    return replace(whole, stored=stored)

image_data.join_splits = slow
images = image_data.prepared_images(image_data.CIFAR10, folder)
print(images.fingerprint, len(images.train[0]), images.folder.name, sum(decoded))
"""


def start(folder: Path, seconds: float = 0, last_row: int = 1_000) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder), str(seconds), str(last_row)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_of_two_processes_one_prepares(tmp_path: Path, cache: Path) -> None:
    folder = make_folders(tmp_path / "own", train=40)
    started = [start(folder, seconds=0.2) for _ in range(2)]
    written = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], written
    results = [out.split() for out, _ in written]
    (entry,) = [path.name for path in cache.iterdir() if not path.name.startswith(".")]
    assert results[0][:3] == results[1][:3] == [results[0][0], "40", entry]
    assert sorted(int(result[3]) for result in results) == [0, 43]
    errors = "".join(error for _, error in written)
    assert errors.count("preparing the images of") == 1
    assert errors.count("waiting for another process") <= 1


def test_after_a_kill_in_the_middle_preparation_begins_anew(tmp_path: Path, cache: Path) -> None:
    folder = make_folders(tmp_path / "own", train=40)
    process = start(folder, last_row=12)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "waits\n"
    finally:
        process.kill()
        process.communicate(timeout=120)
    assert process.returncode != 0
    (left,) = (path.name for path in cache.iterdir() if not path.name.endswith(".lock"))
    assert left.startswith(".part.cifar10.")
    images = prepared_images(CIFAR10, str(folder))
    assert np.array_equal(images.train[0][0], pixels(0).transpose(2, 0, 1))
    assert images.train[0].reshape(40, -1).any(axis=1).all()
    (left,) = (path.name for path in cache.iterdir() if not path.name.endswith(".lock"))
    assert left == images.folder.name
