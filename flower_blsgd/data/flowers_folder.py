"""Oxford Flowers-102 as it is published, and as torchvision keeps it: ``flowers-102``.

Source: https://www.robots.ox.ac.uk/~vgg/data/flowers/102/
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .image_split import ImageSplit
from .published_folder import published_folder, unusable
from .source import DataSource

FOLDER = "flowers-102"
"""What torchvision calls it."""

_LABELS = ("imagelabels.mat", "labels")
_SPLITS = "setid.mat"
_SPLIT_VARIABLES = {"train": "trnid", "validation": "valid", "test": "tstid"}


def flowers_splits(source: DataSource) -> Mapping[str, ImageSplit] | None:
    """Return ``train``, ``validation`` and ``test`` of a folder; None if it has other files.

    Images are in the order of the published lists; labels 1 to 102 become 0 to 101.

    Raises
    ------
    UsageError
        If files are missing or contradict each other.
    """
    marks = (_SPLITS, _LABELS[0])
    folder = next(filter(None, (published_folder(source, FOLDER, mark) for mark in marks)), None)
    if folder is None:
        return None
    for name in (*marks, "jpg"):
        if not (folder / name).exists():
            raise unusable(source, folder / name, "is missing")
    labels = _numbers(source, folder / _LABELS[0], _LABELS[1])
    if labels.min() < 1:
        raise unusable(source, folder / _LABELS[0], f"has the label {labels.min()}")
    return {
        name: _split(source, folder, name, variable, labels)
        for name, variable in _SPLIT_VARIABLES.items()
    }


def _split(
    source: DataSource, folder: Path, name: str, variable: str, labels: npt.NDArray[np.int64]
) -> ImageSplit:
    images = _numbers(source, folder / _SPLITS, variable)
    if images.min() < 1 or images.max() > len(labels):
        raise unusable(
            source,
            folder / _SPLITS,
            f"names the images {images.min()} to {images.max()} in {variable}, but "
            f"{_LABELS[0]} has {len(labels)} labels",
        )

    def stored(first: int, last: int) -> Sequence[Any]:
        paths = (folder / "jpg" / f"image_{number:05}.jpg" for number in images[first:last])
        return [{"bytes": None, "path": str(path)} for path in paths]

    return ImageSplit(name, labels[images - 1] - 1, (), stored)


def _numbers(source: DataSource, path: Path, variable: str) -> npt.NDArray[np.int64]:
    """Return the whole numbers of a variable of a MATLAB file."""
    from scipy.io import loadmat

    try:
        found = loadmat(path, variable_names=[variable])[variable]
        numbers: npt.NDArray[np.int64] = np.asarray(found).reshape(-1).astype(np.int64)
    except Exception as error:  # what scipy raises of a damaged file is not told
        reason = f"no variable {variable}" if isinstance(error, KeyError) else error
        raise unusable(source, path, f"cannot be read ({reason})") from None
    if not len(numbers):
        raise unusable(source, path, f"has an empty {variable}")
    return numbers
