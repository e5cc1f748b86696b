"""One entry of the cache: a folder of arrays and what they are, opened as memory maps."""

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

FORMAT = 3
"""Changes when a folder of the old kind must not be read any more."""

META = "meta.json"
"""What an entry says of itself."""

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
    UsageError
        If it cannot be read, which does not mean that it is damaged.
    """
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise UnusableError("")
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
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        path = Path(str(error.filename))
        told = "" if path == folder else f"{path.name} is missing"
        raise UnusableError(told) from None
    except OSError as error:
        raise unreadable(folder, error) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableError(" ".join(str(error).split()) or type(error).__name__) from None


def unreadable(entry: Path, error: OSError) -> UsageError:
    """Return the line that says that an entry cannot be read, and stays as it is."""
    return UsageError(
        f"{entry} cannot be read ({error.strerror or error}) and stays as it is; mend that, or set "
        "BLSGD_CACHE to another folder"
    )


def read_meta(folder: Path) -> dict[str, Any]:
    """Return what an entry says of itself.

    Raises
    ------
    OtherFormatError
        If it says so in another format.
    OSError, ValueError, KeyError, TypeError
        If it says nothing.
    """
    meta: dict[str, Any] = json.loads((folder / META).read_text())
    if meta["format"] != FORMAT:
        raise OtherFormatError(f"format {meta['format']} is not {FORMAT}")
    return meta


def source_of_another_format(folder: Path) -> str | None:
    """Return what an entry that another version wrote was made of; None of any other folder."""
    try:
        meta = json.loads((folder / META).read_text())
        return str(meta.get("source")) if meta["format"] != FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


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
