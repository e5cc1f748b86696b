"""One entry of the cache: a folder of arrays and what they are, opened as memory maps."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .preparation import PROGRESS_FILES, Contents, Preparation

FORMAT = 2
"""Changes when a folder of the old kind must not be read any more."""

_META = "meta.json"

Pair = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""Inputs and labels."""


@dataclass(frozen=True)
class Prepared:
    """Data that are ready for training.

    The arrays are memory maps: all processes share their pages, and what one writes into them
    stays its own.

    Parameters
    ----------
    train, test : pair of numpy.ndarray
        Inputs, of images uint8 of shape (N, 3, side, side), and labels, int64.
    class_names : tuple of str
        One for each label.
    fingerprint : str
        16 hex digits of the content of `train`.
    folder : Path
        Where they are.
    skipped : mapping
        How many samples of each split were left out.
    facts : mapping
        What else was noted when they were prepared.
    noun : str
        What they are, such as ``"images"``.
    """

    train: Pair
    test: Pair
    class_names: tuple[str, ...]
    fingerprint: str
    folder: Path
    skipped: Mapping[str, int]
    facts: Mapping[str, Any]
    noun: str

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return another array that lies beside them, as a memory map.

        Parameters
        ----------
        name : str
            Such as ``"train_lengths"``.
        """
        return _mapped(self.folder / f"{name}.npy")


class UnusableError(Exception):
    """An entry is damaged; the message says how, and is empty if there is none."""


class OtherFormatError(ValueError):
    """An entry was written by another version of this library."""


def open_entry(folder: Path) -> Prepared:
    """Open an entry, reading nothing but its sizes.

    Raises
    ------
    UnusableError
        If it is not there, or not as it was written.
    OtherFormatError
        If another version wrote it.
    """
    if not folder.is_dir():
        raise UnusableError("")
    try:
        meta = read_meta(folder)
        for name, size in meta["files"].items():
            _check_size(folder / name, size)
        arrays = {name: _open_array(folder, name, told) for name, told in meta["arrays"].items()}
        train, test = (
            (arrays[f"{split}_{meta['inputs']}"], arrays[f"{split}_labels"])
            for split in ("train", "test")
        )
        return Prepared(
            train,
            test,
            tuple(meta["class_names"]),
            str(meta["fingerprint"]),
            folder,
            {str(split): int(count) for split, count in meta["skipped"].items()},
            dict(meta["facts"]),
            str(meta["noun"]),
        )
    except OtherFormatError:
        raise
    except FileNotFoundError as error:
        raise UnusableError(f"{Path(str(error.filename)).name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableError(" ".join(str(error).split()) or type(error).__name__) from None


def read_meta(folder: Path) -> dict[str, Any]:
    """Return what an entry says of itself.

    Raises
    ------
    OtherFormatError
        If it says so in another format.
    OSError, ValueError, KeyError, TypeError
        If it says nothing.
    """
    meta: dict[str, Any] = json.loads((folder / _META).read_text())
    if meta["format"] != FORMAT:
        raise OtherFormatError(f"format {meta['format']} is not {FORMAT}")
    return meta


def source_of_another_format(folder: Path) -> str | None:
    """Return what an entry that another version wrote was made of; None of any other folder."""
    try:
        meta = json.loads((folder / _META).read_text())
        return str(meta.get("source")) if meta["format"] != FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def seal_entry(folder: Path, preparation: Preparation, contents: Contents) -> None:
    """Write what the arrays of a folder are, and see all of it onto the disk.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    left_out = (_META, *PROGRESS_FILES)
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in left_out)
    arrays = {path.stem: path for path in paths if path.parent == folder and path.suffix == ".npy"}
    meta = {
        "format": FORMAT,
        "source": str(preparation.source),
        "options": dict(preparation.options),
        "noun": preparation.noun,
        "inputs": contents.inputs,
        "class_names": list(contents.class_names),
        "skipped": dict(contents.skipped),
        "facts": dict(contents.facts),
        "fingerprint": _fingerprint(arrays[f"train_{contents.inputs}"], arrays["train_labels"]),
        "arrays": {name: _told(path) for name, path in arrays.items()},
        "files": {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in paths
            if path not in arrays.values()
        },
    }
    (folder / _META).write_text(json.dumps(meta, indent=2) + "\n")
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _fingerprint(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        array = np.load(path, mmap_mode="r")
        digest.update(str(array.shape).encode())
        digest.update(array)
    return digest.hexdigest()[:16]


def _told(path: Path) -> dict[str, Any]:
    array = np.load(path, mmap_mode="r")
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "bytes": path.stat().st_size,
    }


def _check_size(path: Path, told: int) -> None:
    size = path.stat().st_size
    if size != told:
        raise ValueError(f"{path.name} has {size} bytes instead of {told}")


def _mapped(path: Path) -> npt.NDArray[Any]:
    # Copy on write: torch warns of arrays that may not be written.
    array: npt.NDArray[Any] = np.load(path, mmap_mode="c")
    return array


def _open_array(folder: Path, name: str, told: Mapping[str, Any]) -> npt.NDArray[Any]:
    path = folder / f"{name}.npy"
    _check_size(path, told["bytes"])
    array = _mapped(path)
    if list(array.shape) != told["shape"] or array.dtype.name != told["dtype"]:
        raise ValueError(f"{path.name} is {array.dtype.name} {array.shape}")
    return array
