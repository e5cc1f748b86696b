"""Labelled images that are not yet decoded: a split as it is stored, and several joined."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ImageSplit:
    """One split.

    Parameters
    ----------
    name : str
        Such as ``"train"``.
    labels : numpy.ndarray
        int64 of shape (n,).
    class_names : tuple of str
        One for each label; empty if the data does not name them.
    stored : callable
        ``(first, last) -> images``: bytes of image files, mappings with ``bytes`` or ``path``,
        or pixels as uint8 arrays of shape (3, height, width).
    """

    name: str
    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]
    stored: Callable[[int, int], Sequence[Any]]

    def __len__(self) -> int:
        return len(self.labels)


class JoinedSplit:
    """Several splits, one after another, of which the first rows count.

    Parameters
    ----------
    name : str
        What they are together, such as ``"train"``.
    parts : sequence of ImageSplit
        In their order.
    max_samples : int (default: 0)
        How many rows count; 0: all.
    """

    def __init__(self, name: str, parts: Sequence[ImageSplit], max_samples: int = 0) -> None:
        self.name = name
        self._parts = parts
        self._ends = list(itertools.accumulate(len(part) for part in parts))
        self._length = min(max_samples or self._ends[-1], self._ends[-1])

    def __len__(self) -> int:
        return self._length

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """int64 of shape (n,)."""
        return np.concatenate([part.labels for part in self._parts])[: len(self)]

    def stored(self, first: int, last: int) -> list[Any]:
        """Return some images as they are stored."""
        images: list[Any] = []
        for part, end in zip(self._parts, self._ends, strict=True):
            begin = end - len(part)
            if first < end and last > begin:
                images += part.stored(max(first - begin, 0), min(last, end) - begin)
        return images

    def place(self, row: int) -> str:
        """Return where a row is in the data: ``"image 7 of validation"``."""
        number = bisect.bisect_right(self._ends, row)
        part = self._parts[number]
        return f"image {row - (self._ends[number] - len(part))} of {part.name}"
