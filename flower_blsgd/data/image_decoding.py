"""Decode the images of a split into arrays on disk, going on where that was interrupted."""

import contextlib
import io
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .image_columns import image_bytes
from .image_resizing import squared
from .image_split import JoinedSplit
from .new_arrays import new_array
from .split_progress import SplitProgress, record_split

_LARGEST_CHUNK = 256
_CHUNK_BYTES = 4 << 20
_LONGEST_REASON = 150

_SECONDS_BETWEEN_RECORDS = 1.0
"""What a killed preparation loses at most; a disk takes a part of that to see to a record."""


@dataclass(frozen=True)
class Decoded:
    """What became of a split: how many images it has now, were left out and were resized."""

    count: int
    skipped: int
    resized: int


def decode_split(
    split: JoinedSplit,
    folder: Path,
    progress: SplitProgress,
    skip_bad: bool,
    on_images: Callable[[int], None],
) -> Decoded:
    """Write ``<split>_images.npy`` (uint8, NCHW, RGB) and ``<split>_labels.npy`` (int64).

    Parameters
    ----------
    split : JoinedSplit
        What to decode.
    folder : Path
        Where to write.
    progress : SplitProgress
        What is there already; see `read_split`.
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
    path, side = folder / f"{split.name}_images.npy", progress.side
    images = progress.images
    if images is None:
        images = new_array(path, (len(split), 3, side, side), np.uint8)
        progress = progress.written(images)
        record_split(folder, split.name, progress)
    recorded = time.monotonic()
    try:
        with contextlib.closing(_chunks(split, images, progress.done, side)) as chunks:
            for chunk in chunks:
                if chunk.bad and not skip_bad:
                    row, reason = chunk.bad[0]
                    raise UsageError(
                        f"data: {split.place(row)} cannot be decoded ({reason}); "
                        "skip-bad = true leaves such images out"
                    )
                progress = progress.after(chunk.rows, [row for row, _ in chunk.bad], chunk.resized)
                if time.monotonic() - recorded >= _SECONDS_BETWEEN_RECORDS:
                    images.flush()
                    record_split(folder, split.name, progress)
                    recorded = time.monotonic()
                on_images(chunk.rows)
    finally:  # also when interrupted
        images.flush()
        record_split(folder, split.name, progress)
    good = np.ones(len(split), bool)
    good[list(progress.bad)] = False
    count = int(good.sum())
    if not count:
        raise UsageError(f"data: none of the {len(split)} images of {split.name} can be decoded")
    if len(images) != count:
        _keep_only(good, images, path)
    labels = new_array(folder / f"{split.name}_labels.npy", (count,), np.int64)
    labels[:] = split.labels[good]
    labels.flush()
    return Decoded(count, len(split) - count, progress.resized)


@dataclass(frozen=True)
class _Chunk:
    """What became of consecutive rows; of bad ones, which and why."""

    rows: int
    bad: list[tuple[int, str]]
    resized: int


def _chunks(
    split: JoinedSplit, images: npt.NDArray[np.uint8], done: int, side: int
) -> Generator[_Chunk, None, None]:
    """Write the images from row `done` on; yield what is written, in order."""
    size = min(max(_CHUNK_BYTES // (3 * side * side), 1), _LARGEST_CHUNK)

    def decode(first: int) -> _Chunk:
        bad, resized = [], 0
        stored = split.stored(first, min(first + size, len(split)))
        for row, one in enumerate(stored, start=first):
            try:
                images[row], was_resized = _decoded(one, side)
                resized += was_resized
            except Exception as error:
                bad.append((row, _reason(error, one)))
        return _Chunk(len(stored), bad, resized)

    with _thread_per_core() as pool:
        yield from pool.map(decode, range(done, len(split), size))


def _decoded(stored: Any, side: int) -> tuple[npt.NDArray[np.uint8], bool]:
    """Return an image as CHW, and whether it had another size."""
    from PIL import Image

    if isinstance(stored, np.ndarray):
        if stored.shape[1:] == (side, side):
            return stored, False
        opened = Image.fromarray(stored.transpose(1, 2, 0))
    else:
        opened = Image.open(io.BytesIO(image_bytes(stored)))
    with opened as image:
        square, resized = squared(image, side)
    return np.asarray(square).transpose(2, 0, 1), resized


def _reason(error: Exception, stored: Any) -> str:
    # PIL names the object that it read from.
    text = " ".join(str(error).partition(" <_io.")[0].split())[:_LONGEST_REASON]
    path = str(stored.get("path") or "") if isinstance(stored, dict) else ""
    shown = [text or type(error).__name__, "" if path in text else path]
    return ", ".join(filter(None, shown))


def _keep_only(good: npt.NDArray[np.bool_], images: npt.NDArray[np.uint8], path: Path) -> None:
    kept_path = path.with_suffix(".kept")
    rows = np.flatnonzero(good)
    kept = new_array(kept_path, (len(rows), *images.shape[1:]), np.uint8)
    for first in range(0, len(rows), _LARGEST_CHUNK):
        kept[first : first + _LARGEST_CHUNK] = images[rows[first : first + _LARGEST_CHUNK]]
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
