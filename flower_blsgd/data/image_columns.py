"""Which columns of a table hold the images and the labels."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

LAYOUT = (
    "train-*.parquet and test-*.parquet with columns img and label, or image folders "
    "train/<class>/*.png and test/<class>/*.png"
)
"""What a folder must look like."""

_IMAGE_NAMES = ("img", "image")
_LABEL_NAMES = ("label", "labels")
_FEWEST_CLASSES = 2


@dataclass(frozen=True)
class ImageSplit:
    """One split: labels, and images that are not yet decoded.

    Parameters
    ----------
    name : str
        Such as ``"train"``.
    labels : numpy.ndarray
        int64 of shape (n,).
    class_names : tuple of str
        One for each label; empty if the data does not name them.
    rows : datasets.Dataset
        A single column.
    """

    name: str
    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]
    rows: Any

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, first: int, last: int) -> list[Any]:
        """Return the images of some rows as they are stored; see `image_bytes`."""
        (column,) = self.rows[first:last].values()
        return list(column)


def image_bytes(stored: Any) -> bytes:
    """Return the bytes of a stored image: the bytes themselves, or in a file of their own.

    Raises
    ------
    ValueError
        If there are none.
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
    return Path(path).read_bytes()


def image_split(said: str, name: str, table: Any) -> ImageSplit:
    """Find the columns of a split.

    Parameters
    ----------
    said : str
        How messages begin.
    name : str
        Of the split.
    table : datasets.Dataset
        All its columns.

    Raises
    ------
    UsageError
        If there is no column of images or of labels, or the labels are no classes.
    """
    from datasets import Image

    features = table.features
    image, label = _image_column(features), _label_column(features)
    found = f"found the columns {', '.join(features)}"
    if image is None:
        raise UsageError(f"{said}: no image column in {name}, {found}; expected {LAYOUT}")
    if label is None:
        raise UsageError(
            f"{said}: no label column in {name}, {found}; expected whole numbers in label or "
            "labels, or one folder per class"
        )
    rows = table.select_columns([image])
    if isinstance(features[image], Image):
        rows = rows.cast_column(image, Image(decode=False))
    class_names = tuple(getattr(features[label], "names", ()))
    return ImageSplit(name, _labels(said, name, table, label), class_names, rows)


def _image_column(features: Any) -> str | None:
    from datasets import Image

    images = [column for column, feature in features.items() if isinstance(feature, Image)]
    named = [column for column in _IMAGE_NAMES if column in features]
    both = [column for column in named if column in images]
    stored = [column for column in named if _holds_bytes(features[column])]
    return next(iter([*both, *images, *stored]), None)


def _holds_bytes(feature: Any) -> bool:
    inner = feature.get("bytes") if isinstance(feature, dict) else feature
    return getattr(inner, "dtype", "") in ("binary", "large_binary")


def _label_column(features: Any) -> str | None:
    for column in _LABEL_NAMES:
        if "int" in str(getattr(features.get(column), "dtype", "")):
            return column
    return None


def _labels(said: str, name: str, table: Any, column: str) -> npt.NDArray[np.int64]:
    values = table.select_columns([column]).with_format("arrow")[:].column(column)
    if len(values) == 0:
        raise UsageError(f"{said}: {name} is empty; expected {LAYOUT}")
    if values.null_count:
        raise UsageError(
            f"{said}: {values.null_count} rows of {name} have no {column}; expected {LAYOUT}"
        )
    labels: npt.NDArray[np.int64] = values.to_numpy().astype(np.int64)
    if labels.min() < 0:
        raise UsageError(
            f"{said}: {column} of {name} goes down to {labels.min()}; classes count from 0, so "
            "this split is probably one without labels"
        )
    if name == "train" and len(np.unique(labels)) < _FEWEST_CLASSES:
        raise UsageError(f"{said}: all images of {name} have the same {column}; expected {LAYOUT}")
    return labels
