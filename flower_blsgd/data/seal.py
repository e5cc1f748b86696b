"""Write what an entry of the cache is, and check later that it is still that."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from .entry import FORMAT, META, UnusableError, read_meta, unreadable
from .preparation import PROGRESS_FILES, Contents, Preparation


def seal_entry(folder: Path, preparation: Preparation, contents: Contents) -> None:
    """Write what the arrays of a folder are, and see all of it onto the disk.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    left_out = (META, *PROGRESS_FILES)
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in left_out)
    arrays = {path.stem: path for path in paths if path.parent == folder and path.suffix == ".npy"}
    named = {path.relative_to(folder).as_posix(): path for path in paths}
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
            name: path.stat().st_size for name, path in named.items() if path not in arrays.values()
        },
        "sha256": {name: _sha256(path) for name, path in named.items()},
    }
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n")
    for path in (*folder.rglob("*"), folder):
        sync(path)


def check_content(folder: Path) -> None:
    """Read all files of an entry, and compare them with what was written.

    Raises
    ------
    UnusableError
        If one of them has changed.
    UsageError
        If it cannot be read.
    """
    try:
        for name, told in read_meta(folder)["sha256"].items():
            if _sha256(folder / name) != told:
                raise UnusableError(f"{name} has not the content that was written")
    except OSError as error:
        raise unreadable(folder, error) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableError(" ".join(str(error).split()) or type(error).__name__) from None


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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _told(path: Path) -> dict[str, Any]:
    array = np.load(path, mmap_mode="r")
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "bytes": path.stat().st_size,
    }
