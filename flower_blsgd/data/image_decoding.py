"""Decode the images of a split into arrays on disk."""

import contextlib
import errno
import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from ..errors import UsageError
from .image_columns import ImageSplit, image_bytes

SIZE = 32
"""Height and width of the images."""

_CHUNK = 256
_LONGEST_REASON = 150


@dataclass(frozen=True)
class Decoded:
    """What became of a split: how many images it has now, were left out and were resized."""

    count: int
    skipped: int
    resized: int


def decode_split(
    split: ImageSplit, folder: Path, skip_bad: bool, on_images: Callable[[int], None]
) -> Decoded:
    """Write ``<split>_images.npy`` (uint8, NCHW, RGB) and ``<split>_labels.npy`` (int64).

    Parameters
    ----------
    split : ImageSplit
        What to decode.
    folder : Path
        Where to write.
    skip_bad : bool
        Leave images out that cannot be decoded.
    on_images : callable
        Called with the number of images after each chunk.

    Raises
    ------
    UsageError
        If an image cannot be decoded, and with `skip_bad` if none can.
    OSError
        If the folder cannot be written.
    """
    path = folder / f"{split.name}_images.npy"
    images = new_array(path, (len(split), 3, SIZE, SIZE), np.uint8)
    good, resized = np.ones(len(split), bool), 0

    def decode_chunk(first: int) -> tuple[int, list[tuple[int, str]], int]:
        bad, resized = [], 0
        stored = split.encoded(first, min(first + _CHUNK, len(split)))
        for place, one in enumerate(stored, start=first):
            try:
                images[place], was_resized = _decoded(image_bytes(one))
                resized += was_resized
            except Exception as error:
                bad.append((place, _reason(error, one)))
        return len(stored), bad, resized

    with _thread_per_core() as pool:
        for number, bad, chunk_resized in pool.map(decode_chunk, range(0, len(split), _CHUNK)):
            if bad and not skip_bad:
                place, reason = bad[0]
                raise UsageError(
                    f"data: image {place} of {split.name} cannot be decoded ({reason}); "
                    "skip-bad = true leaves such images out"
                )
            good[[place for place, _ in bad]] = False
            resized += chunk_resized
            on_images(number)
    if not good.any():
        raise UsageError(f"data: none of the {len(split)} images of {split.name} can be decoded")
    if not good.all():
        _keep_only(good, images, path)
    labels = new_array(folder / f"{split.name}_labels.npy", (int(good.sum()),), np.int64)
    labels[:] = split.labels[good]
    for array in (images, labels):
        array.flush()
    return Decoded(int(good.sum()), int((~good).sum()), resized)


def new_array(
    path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> "np.memmap[Any, np.dtype[Any]]":
    """Return a new array on disk.

    Raises
    ------
    OSError
        If there is no room for it. A memory map that outgrows its disk would kill the process.
    """
    array: np.memmap[Any, np.dtype[Any]] = open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    elif shutil.disk_usage(path.parent).free < array.nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return array


def _decoded(encoded: bytes) -> tuple[npt.NDArray[np.uint8], bool]:
    """Return an image as CHW, and whether it had another size."""
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        colours = image.convert("RGB")
    resized = colours.size != (SIZE, SIZE)
    if resized:
        colours = colours.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return np.asarray(colours).transpose(2, 0, 1), resized


def _reason(error: Exception, stored: Any) -> str:
    # PIL names the object that it read from.
    text = " ".join(str(error).partition(" <_io.")[0].split())[:_LONGEST_REASON]
    path = stored.get("path") if isinstance(stored, dict) else None
    return ", ".join(filter(None, [text or type(error).__name__, path and str(path)]))


def _keep_only(good: npt.NDArray[np.bool_], images: npt.NDArray[np.uint8], path: Path) -> None:
    kept_path = path.with_suffix(".kept")
    places = np.flatnonzero(good)
    kept = new_array(kept_path, (len(places), *images.shape[1:]), np.uint8)
    for first in range(0, len(places), _CHUNK):
        kept[first : first + _CHUNK] = images[places[first : first + _CHUNK]]
    kept.flush()
    kept_path.replace(path)


@contextlib.contextmanager
def _thread_per_core() -> Iterator[ThreadPoolExecutor]:
    """Yield threads; after an error the work that has not begun is dropped."""
    from PIL import Image

    Image.preinit()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pool = ThreadPoolExecutor(cores or 1, thread_name_prefix="decode")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd, but readable images
            yield pool
    finally:
        pool.shutdown(cancel_futures=True)
