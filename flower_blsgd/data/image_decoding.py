"""Decode stored images, of any size and kind, into one array on disk."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .cache import new_array
from .splits import Split

if TYPE_CHECKING:
    from PIL.Image import Image

_log = logging.getLogger(__name__)

_LARGEST_CHUNK = 256
_CHUNK_BYTES = 4 << 20
"""A thread decodes images of one chunk after another: so many at most, of so many bytes."""

_LONGEST_REASON = 150

_REDUCING_GAP = 2.0
"""A much larger image is first reduced by a whole number, to no less than so many times the size:
faster, and hardly to be told from resizing at once."""

_SIXTEEN_BITS = "I;16"
_NO_KNOWN_WHITE = ("I", "F")
_WHITE, _SIXTEEN_BIT_WHITE = 255, 65535


def decode_split(
    split: Split,
    folder: Path,
    part: str,
    side: int,
    skip_bad: bool,
    on_images: Callable[[int], None],
) -> int:
    """Write ``<part>_images.npy`` and ``<part>_labels.npy``; return how many images are left out.

    Images are uint8 of shape (rows, 3, side, side), RGB, and labels int64 of shape (rows,).

    Parameters
    ----------
    split : Split
        What to decode, by a thread for each core.
    folder, part : Path, str
        Where to write.
    side : int
        Height and width in pixels.
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
    path = folder / f"{part}_images.npy"
    images = new_array(path, (len(split), 3, side, side), np.uint8)
    size = min(max(_CHUNK_BYTES // (3 * side * side), 1), _LARGEST_CHUNK)
    good = np.ones(len(split), bool)

    def decode(first: int) -> tuple[int, list[tuple[int, str]]]:
        """Return how many rows a chunk has, and which of them are bad, and why."""
        stored = split.stored(first, min(first + size, len(split)))
        bad = []
        for row, one in enumerate(stored, start=first):
            try:
                images[row] = _decoded(one, side)
            except Exception as error:  # whatever PIL raises of a damaged file
                bad.append((row, _reason(error, one)))
        return len(stored), bad

    with _thread_per_core() as pool:
        for rows, bad in pool.map(decode, range(0, len(split), size)):
            if bad and not skip_bad:
                row, reason = bad[0]
                raise UsageError(
                    f"data: image {row} of {split.name} cannot be decoded ({reason}); "
                    "skip-bad = true leaves such images out"
                )
            good[[row for row, _ in bad]] = False
            on_images(rows)
    images.flush()
    count = int(good.sum())
    if not count:
        raise UsageError(f"data: none of the {len(split)} images of {split.name} can be decoded")
    if count < len(split):
        _log.warning(
            "left out %d of %d images of %s that cannot be decoded",
            len(split) - count,
            len(split),
            split.name,
        )
        kept = path.with_suffix(".kept.npy")  # beside the file that is mapped still
        np.save(kept, images[good])
        kept.replace(path)
    np.save(folder / f"{part}_labels.npy", split.labels[good])
    return len(split) - count


def image_bytes(stored: Any) -> bytes:
    """Return the bytes of a stored image: the bytes themselves, or in a file of their own.

    Raises
    ------
    ValueError
        If there are none, or the path of the file depends on the working directory.
    OSError
        If the file cannot be read.
    """
    path = None
    if isinstance(stored, dict):
        stored, path = stored.get("bytes"), stored.get("path")
    if stored is not None:
        return bytes(stored)
    if path is None:
        raise ValueError("there is no image")
    if not Path(path).is_absolute():
        raise ValueError("there is no image but a relative path, which may mean any file")
    return Path(path).read_bytes()


def squared(image: "Image", side: int) -> "Image":
    """Return the middle of an image, as RGB of `side` by `side` pixels.

    The shorter side is made `side` long, bilinearly and without aliasing, and of the longer one
    the middle is kept.

    Parameters
    ----------
    image : PIL.Image.Image
        Grey of 8 or 16 bits, with a palette, with transparency (which is dropped), CMYK or RGB;
        if it was only opened, a JPEG is decoded at a fraction of its size where that is large
        enough.
    side : int
        Height and width in pixels.

    Raises
    ------
    ValueError
        If nothing says which of its values is white.
    """
    from PIL.Image import Resampling

    if image.size != (side, side):
        enough = int(side * _REDUCING_GAP)
        image.draft(None, (enough, enough))
    colours = _eight_bits(image).convert("RGB")
    if colours.size != (side, side):
        width, height = colours.size
        shorter = min(width, height)
        left, upper = (width - shorter) / 2, (height - shorter) / 2
        middle = (left, upper, left + shorter, upper + shorter)
        colours = colours.resize(
            (side, side), Resampling.BILINEAR, box=middle, reducing_gap=_REDUCING_GAP
        )
    return colours


def _eight_bits(image: "Image") -> "Image":
    """Return an image whose white is 255; PIL cuts larger values off there."""
    from PIL import Image

    if image.mode in _NO_KNOWN_WHITE:
        raise ValueError(f"its kind {image.mode} (32 bits) does not say what is white")
    if not image.mode.startswith(_SIXTEEN_BITS):
        return image
    values = np.asarray(image).astype(np.uint32)
    rounded = (values * _WHITE + _SIXTEEN_BIT_WHITE // 2) // _SIXTEEN_BIT_WHITE
    return Image.fromarray(rounded.astype(np.uint8))


def _decoded(stored: Any, side: int) -> npt.NDArray[np.uint8]:
    """Return an image as CHW."""
    from PIL import Image

    if isinstance(stored, np.ndarray):
        if stored.shape[1:] == (side, side):
            return stored
        opened = Image.fromarray(stored.transpose(1, 2, 0))
    else:
        opened = Image.open(io.BytesIO(image_bytes(stored)))
    with opened as image:
        square = squared(image, side)
    return np.asarray(square).transpose(2, 0, 1)


def _reason(error: Exception, stored: Any) -> str:
    """Return why an image cannot be decoded, with the name of its file."""
    # PIL names the object that it read from.
    text = " ".join(str(error).partition(" <_io.")[0].split())[:_LONGEST_REASON]
    path = str(stored.get("path") or "") if isinstance(stored, dict) else ""
    shown = [text or type(error).__name__, "" if path in text else path]
    return ", ".join(filter(None, shown))


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
