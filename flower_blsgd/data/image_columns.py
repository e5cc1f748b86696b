"""Which columns of a table hold the images and the labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .image_split import ImageSplit
from .source import DataSource

_IMAGE_NAMES = ("img", "image")
_LABEL_NAMES = ("label", "labels")
_FEWEST_CLASSES = 2


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


def table_split(source: DataSource, name: str, table: Any, label_column: str = "") -> ImageSplit:
    """Find the columns of a split.

    Parameters
    ----------
    source : DataSource
        Where the table comes from.
    name : str
        Of the split.
    table : datasets.Dataset
        All its columns.
    label_column : str (default: "")
        Taken before the usual names.

    Raises
    ------
    UsageError
        If there is no column of images or of labels, or the labels are no classes.
    """
    from datasets import Image

    features = table.features
    known = tuple(dict.fromkeys((*filter(None, [label_column]), *_LABEL_NAMES)))
    image, label = _image_column(features), _label_column(features, known)
    found = f"found the columns {', '.join(features)}"
    if image is None:
        raise UsageError(
            f"{source.said}: no image column in {name}, {found}; expected {source.layout}"
        )
    if label is None:
        raise UsageError(
            f"{source.said}: no label column in {name}, {found}; expected whole numbers in "
            f"{', '.join(known[:-1])} or {known[-1]}, or one folder per class"
        )
    rows = table.select_columns([image])
    if isinstance(features[image], Image):
        rows = rows.cast_column(image, Image(decode=False))

    def stored(first: int, last: int) -> Sequence[Any]:
        (column,) = rows[first:last].values()
        return list(column)

    labels = _labels(source, name, table, label)
    return ImageSplit(name, labels, tuple(getattr(features[label], "names", ())), stored)


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


def _label_column(features: Any, known: Sequence[str]) -> str | None:
    for column in known:
        if "int" in str(getattr(features.get(column), "dtype", "")):
            return column
    return None


def _labels(source: DataSource, name: str, table: Any, column: str) -> npt.NDArray[np.int64]:
    values = table.select_columns([column]).with_format("arrow")[:].column(column)
    if len(values) == 0:
        raise UsageError(f"{source.said}: {name} is empty; expected {source.layout}")
    if values.null_count:
        raise UsageError(
            f"{source.said}: {values.null_count} rows of {name} have no {column}; expected "
            f"{source.layout}"
        )
    labels: npt.NDArray[np.int64] = values.to_numpy().astype(np.int64)
    if labels.min() < 0:
        raise UsageError(
            f"{source.said}: {column} of {name} goes down to {labels.min()}; classes count from "
            "0, so this split is probably one without labels"
        )
    if name == "train" and len(np.unique(labels)) < _FEWEST_CLASSES:
        raise UsageError(
            f"{source.said}: all images of {name} have the same {column}; expected {source.layout}"
        )
    return labels
