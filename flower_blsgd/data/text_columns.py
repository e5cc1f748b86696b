"""Which columns of a table hold the texts and their labels, and which rows are of use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

LAYOUT = "train-*.parquet and test-*.parquet, or .csv, with columns text and label"
"""What a folder must look like."""

_TEXT_NAMES = ("text", "sentence", "content")
_LABEL_NAMES = ("label", "labels")
_NO_LABEL = -1
_LARGEST_WHOLE = 2.0**53
"""From here on a decimal does not tell one whole number from the next."""


@dataclass(frozen=True)
class TextSplit:
    """One split: labels, and texts that are read when they are needed.

    Parameters
    ----------
    name : str
        Such as ``"train"``.
    labels : numpy.ndarray
        int64 of shape (n,); -1 where a row has none.
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

    def read(self, first: int, last: int) -> tuple[list[str], dict[int, str]]:
        """Return the texts of rows [first, last), and what is wrong with which of these rows.

        The text of a row that has none is empty.
        """
        (column,) = self.rows[first:last].values()
        texts, wrong = [], {}
        for place, stored in enumerate(column, start=first):
            try:
                text = stored.decode() if isinstance(stored, bytes) else stored
            except UnicodeDecodeError as error:
                text, wrong[place] = "", f"is no text ({error.reason})"
            else:
                if not (text and text.strip()):
                    text, wrong[place] = "", "has no text"
                elif self.labels[place] == _NO_LABEL:
                    wrong[place] = "has no label"
            texts.append(text)
        return texts, wrong


def text_split(
    said: str, name: str, table: Any, class_names: Sequence[str], max_samples: int = 0
) -> TextSplit:
    """Find the columns of a split.

    Parameters
    ----------
    said : str
        How messages begin.
    name : str
        Of the split.
    table : datasets.Dataset
        All its columns.
    class_names : sequence of str
        The classes that there must be.
    max_samples : int (default: 0)
        Above 0: take the first so many rows only.

    Raises
    ------
    UsageError
        If there is no column of texts or of labels, or the labels are not of these classes.
    """
    features = table.features
    text = _column(features, _TEXT_NAMES)
    label = _column(features, _LABEL_NAMES)
    found = f"found the columns {', '.join(features)}"
    if text is None:
        raise UsageError(f"{said}: no text column in {name}, {found}; expected {LAYOUT}")
    if label is None:
        raise UsageError(f"{said}: no label column in {name}, {found}; expected {LAYOUT}")
    kind = str(getattr(features[text], "dtype", features[text]))
    if kind not in ("string", "large_string", "binary", "large_binary"):
        raise UsageError(f"{said}: column {text} of {name} is {kind}, no text; expected {LAYOUT}")
    if len(table) == 0:
        raise UsageError(f"{said}: {name} is empty; expected {LAYOUT}")
    names = tuple(getattr(features[label], "names", None) or ())
    if names and len(names) != len(class_names):
        raise UsageError(
            f"{said}: {label} of {name} has {len(names)} classes ({', '.join(names)}), but this "
            f"task has {len(class_names)}"
        )
    labels = _labels(said, name, table, label)
    _check_classes(f"{said}: {label} of {name}", labels, len(class_names), name == "train")
    count = min(len(labels), max_samples or len(labels))
    rows = table.select_columns([text]).select(range(count))
    return TextSplit(name, labels[:count], names, rows)


def _column(features: Any, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in features), None)


def _labels(said: str, name: str, table: Any, column: str) -> npt.NDArray[np.int64]:
    """Return whole numbers; a csv file with an empty cell has decimals in the whole column."""
    values = table.select_columns([column]).with_format("arrow")[:].column(column)
    if not str(values.type).startswith(("int", "uint", "float", "double")):
        raise UsageError(
            f"{said}: column {column} of {name} is {values.type}, but labels are whole numbers "
            "that count the classes from 0"
        )
    missing = np.asarray(values.is_null(nan_is_null=True))
    numbers = np.asarray(values, dtype=np.float64)
    whole = (np.abs(numbers) < _LARGEST_WHOLE) & (numbers == np.floor(numbers))
    broken = np.flatnonzero(~missing & ~whole)
    if len(broken):
        raise UsageError(
            f"{said}: row {broken[0]} of {name} has the {column} {numbers[broken[0]]}, but labels "
            "are whole numbers"
        )
    negative = np.flatnonzero(~missing & (numbers < 0))
    if len(negative):
        raise UsageError(
            f"{said}: {column} of {name} goes down to {int(numbers[~missing].min())}; classes "
            "count from 0, so this split is probably one without labels"
        )
    labels: npt.NDArray[np.int64] = np.where(missing, _NO_LABEL, numbers).astype(np.int64)
    return labels


def _check_classes(said: str, labels: npt.NDArray[np.int64], count: int, whole: bool) -> None:
    found = np.unique(labels[labels != _NO_LABEL])
    if len(found) and found[-1] >= count:
        raise UsageError(
            f"{said} goes up to {found[-1]}, but this task has {count} classes, 0 to {count - 1}"
        )
    if whole and len(found) < count:
        numbers = ", ".join(map(str, found)) or "none"
        raise UsageError(
            f"{said} has only the classes {numbers}, but this task has {count}, 0 to {count - 1}"
        )
