"""Arrays on disk, with their room reserved before anything is written into them."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap


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


def old_array(
    path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> "np.memmap[Any, np.dtype[Any]] | None":
    """Return an array that `new_array` left, to write on; None if it is not there or not so."""
    try:
        np.load(path, mmap_mode="r")  # refuses a file that is too short, which "r+" would lengthen
        array: np.memmap[Any, np.dtype[Any]] = open_memmap(path, mode="r+")
    except (OSError, ValueError):
        return None
    return array if array.shape == shape and array.dtype == dtype else None
