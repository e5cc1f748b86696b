"""How far the decoding of a split is, on disk beside what it has written."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .image_split import JoinedSplit
from .new_arrays import old_array
from .preparation import read_progress, record_progress


@dataclass(frozen=True)
class SplitProgress:
    """What is there of a split.

    Parameters
    ----------
    key : str
        Of the labels of all rows: what is there was made of other data if it differs.
    side : int
        Height and width of the images.
    images : numpy.memmap, optional
        The array that was begun: all rows, or when all were decoded only the good ones.
    done : int
        So many rows from the first are decoded.
    bad : tuple of int
        Which of them cannot be.
    resized : int
        How many of them had another size.
    """

    key: str
    side: int
    images: "np.memmap[Any, np.dtype[Any]] | None" = None
    done: int = 0
    bad: tuple[int, ...] = ()
    resized: int = 0

    def written(self, images: "np.memmap[Any, np.dtype[Any]]") -> "SplitProgress":
        """Return it with an array that was begun."""
        return dataclasses.replace(self, images=images)

    def after(self, rows: int, bad: Sequence[int], resized: int) -> "SplitProgress":
        """Return how far it is after some rows more."""
        return dataclasses.replace(
            self,
            done=self.done + rows,
            bad=(*self.bad, *bad),
            resized=self.resized + resized,
        )


def read_split(folder: Path, split: JoinedSplit, side: int) -> SplitProgress:
    """Return what is there of a split; if any of it is in doubt, nothing."""
    labels = split.labels
    fresh = SplitProgress(hashlib.sha256(labels.tobytes()).hexdigest(), side)
    told = read_progress(folder).get(split.name)
    if not isinstance(told, dict) or (told.get("key"), told.get("side")) != (fresh.key, side):
        return fresh
    try:
        done, resized = int(told["done"]), int(told["resized"])
        bad = tuple(int(row) for row in told["bad"])
    except (KeyError, TypeError, ValueError):
        return fresh
    if not (0 <= done <= len(split) and all(0 <= row < done for row in bad)):
        return fresh
    path = folder / f"{split.name}_images.npy"
    counts = [len(split), len(split) - len(bad)] if done == len(split) else [len(split)]
    for count in counts:
        images = old_array(path, (count, 3, side, side), np.uint8)
        if images is not None:
            return SplitProgress(fresh.key, side, images, done, bad, resized)
    return fresh


def record_split(folder: Path, name: str, progress: SplitProgress) -> None:
    """Record how far a split is; its images must be flushed before.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    told = {
        "key": progress.key,
        "side": progress.side,
        "done": progress.done,
        "bad": list(progress.bad),
        "resized": progress.resized,
    }
    record_progress(folder, {**read_progress(folder), name: told})
