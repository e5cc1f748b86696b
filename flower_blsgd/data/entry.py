"""One entry of the cache: a folder of arrays and what they are, opened as memory maps."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FORMAT = 1
"""Changes when a folder of the old kind must not be read any more."""

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")

_META = "meta.json"

Pair = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
"""Images as NCHW and labels."""


@dataclass(frozen=True)
class Prepared:
    """Images that are ready for training.

    The arrays are memory maps: all processes share their pages, and what one writes into them
    stays its own.

    Parameters
    ----------
    train, test : pair of numpy.ndarray
        Images, uint8 of shape (N, 3, 32, 32), and labels, int64.
    class_names : tuple of str
        One for each label.
    fingerprint : str
        16 hex digits of the content of `train`.
    folder : Path
        Where they are.
    skipped : mapping
        How many images of each split were left out.
    """

    train: Pair
    test: Pair
    class_names: tuple[str, ...]
    fingerprint: str
    folder: Path
    skipped: Mapping[str, int]


class UnusableError(Exception):
    """An entry is damaged; the message says how, and is empty if there is none."""


def open_entry(folder: Path) -> Prepared:
    """Open an entry, reading nothing but its sizes.

    Raises
    ------
    UnusableError
        If it is not there, or not as it was written.
    """
    if not folder.is_dir():
        raise UnusableError("")
    try:
        meta = read_meta(folder)
        arrays = [_open_array(folder, name, meta["arrays"][name]) for name in ARRAYS]
        return Prepared(
            (arrays[0], arrays[1]),
            (arrays[2], arrays[3]),
            tuple(meta["class_names"]),
            str(meta["fingerprint"]),
            folder,
            {str(split): int(count) for split, count in meta["skipped"].items()},
        )
    except FileNotFoundError as error:
        raise UnusableError(f"{Path(str(error.filename)).name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableError(" ".join(str(error).split()) or type(error).__name__) from None


def read_meta(folder: Path) -> dict[str, Any]:
    """Return what an entry says of itself.

    Raises
    ------
    OSError, ValueError, KeyError, TypeError
        If it says nothing, or in another format.
    """
    meta: dict[str, Any] = json.loads((folder / _META).read_text())
    if meta["format"] != FORMAT:
        raise ValueError(f"format {meta['format']} is not {FORMAT}")
    return meta


def seal_entry(
    folder: Path,
    source: str,
    skip_bad: bool,
    class_names: Sequence[str],
    skipped: Mapping[str, int],
) -> None:
    """Write what the arrays of a folder are, and see all of it onto the disk.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    digest = hashlib.sha256()
    for name in ARRAYS[:2]:
        digest.update(str(arrays[name].shape).encode())
        digest.update(arrays[name])
    meta = {
        "format": FORMAT,
        "source": source,
        "skip_bad": skip_bad,
        "class_names": list(class_names),
        "skipped": dict(skipped),
        "fingerprint": digest.hexdigest()[:16],
        "arrays": {
            name: {
                "shape": list(array.shape),
                "dtype": array.dtype.name,
                "bytes": (folder / f"{name}.npy").stat().st_size,
            }
            for name, array in arrays.items()
        },
    }
    (folder / _META).write_text(json.dumps(meta, indent=2) + "\n")
    for path in (*folder.iterdir(), folder):
        sync(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _open_array(folder: Path, name: str, told: Mapping[str, Any]) -> npt.NDArray[Any]:
    path = folder / f"{name}.npy"
    size = path.stat().st_size
    if size != told["bytes"]:
        raise ValueError(f"{path.name} has {size} bytes instead of {told['bytes']}")
    # Copy on write: torch warns of arrays that may not be written.
    array: npt.NDArray[Any] = np.load(path, mmap_mode="c")
    if list(array.shape) != told["shape"] or array.dtype.name != told["dtype"]:
        raise ValueError(f"{path.name} is {array.dtype.name} {array.shape}")
    return array
