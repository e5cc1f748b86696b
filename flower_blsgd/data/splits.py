"""Splits of labelled samples that are not prepared yet, and the classes of their labels."""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .source import DataSource

_log = logging.getLogger(__name__)

NO_LABEL = -1
"""The label of a row that has none."""


@dataclass(frozen=True)
class Split:
    """One split of a data set.

    Parameters
    ----------
    name : str
        Such as ``"train"``.
    labels : numpy.ndarray
        int64 of shape (n,), with `NO_LABEL` where a row has none.
    class_names : tuple of str
        One for each label; empty if the data do not name them.
    stored : callable
        ``(first, last) -> samples``: texts, or images as bytes of image files, mappings with
        ``bytes`` or ``path``, or pixels as uint8 arrays of shape (3, height, width).
    """

    name: str
    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]
    stored: Callable[[int, int], Sequence[Any]]

    def __len__(self) -> int:
        return len(self.labels)


def join_splits(splits: Sequence[Split], max_samples: int = 0) -> Split:
    """Return splits one after another as one, named such as ``"train + test"``.

    Parameters
    ----------
    splits : sequence of Split
        In their order; their classes are the same.
    max_samples : int (default: 0)
        Only the first so many rows; 0: all.
    """
    labels = np.concatenate([split.labels for split in splits])
    starts = list(itertools.accumulate((len(split) for split in splits), initial=0))

    def stored(first: int, last: int) -> Sequence[Any]:
        return [
            sample
            for split, start in zip(splits, starts, strict=False)
            if first < start + len(split) and last > start
            for sample in split.stored(max(first - start, 0), min(last - start, len(split)))
        ]

    name = " + ".join(dict.fromkeys(split.name for split in splits))
    return Split(name, labels[: max_samples or None], splits[0].class_names, stored)


def table_split(source: DataSource, name: str, table: Any, column: str, label_column: str) -> Split:
    """Return two columns of a ``datasets.Dataset``, of samples and of labels, as a split.

    Raises
    ------
    UsageError
        If there is no row, or a label is not a whole number from 0 on.
    """
    samples = table.select_columns([column])

    def stored(first: int, last: int) -> Sequence[Any]:
        return list(samples[first:last][column])

    labels = _read_labels(source, name, table, label_column)
    class_names = tuple(getattr(table.features[label_column], "names", None) or ())
    return Split(name, labels, class_names, stored)


def find_column(
    source: DataSource,
    split: str,
    table: Any,
    what: str,
    names: Sequence[str],
    feature_type: type | None = None,
) -> str:
    """Return the first of the named columns of a ``datasets.Dataset``, else the only one of a type.

    `source`, `split` and `what`, such as ``"label"``, are for messages.

    Raises
    ------
    UsageError
        If there is no such column.
    """
    features = table.features
    for name in names:
        if name in features:
            return name
    typed: list[str] = [
        name for name, one in features.items() if feature_type and isinstance(one, feature_type)
    ]
    if len(typed) != 1:
        raise UsageError(
            f"{source.setting}: no {what} column in {split}, found the columns "
            f"{', '.join(features)}; expected {source.layout}"
        )
    return typed[0]


def find_classes(
    source: DataSource, task: str, splits: Sequence[Split], expected: int | None
) -> tuple[str, ...]:
    """Return the name of each class in any row of the splits, its number where it has no name.

    `expected` is how many classes there must be; None for any number. `source` and `task` are for
    messages.

    Raises
    ------
    UsageError
        If splits name different classes, labels lie beyond the names, or the number of classes
        is wrong.
    """
    named = {split.class_names for split in splits if split.class_names}
    if len(named) > 1:
        raise UsageError(
            f"{source.setting}: {' and '.join(split.name for split in splits)} have different "
            "classes; they need the same, in the same order"
        )
    names = named.pop() if named else ()
    highest = max(int(split.labels.max()) for split in splits)
    count = len(names) or highest + 1
    if highest >= count:
        raise UsageError(
            f"{source.setting}: there is a label {highest}, but {count} names of classes, counted "
            "from 0; correct the labels or the names"
        )
    if expected is not None and count != expected:
        raise UsageError(
            f"{source.setting}: wrong number of classes: found {count}, expected the {expected} "
            f"of {task}, counted from 0; name a folder with these, or leave data empty for the HF "
            f"hub's {source.hf_hub_name}"
        )
    if count < 2:
        raise UsageError(
            f"{source.setting}: all {source.noun} have the same label; expected {source.layout}"
        )
    if expected is None and not names and count > sum(map(len, splits)):
        raise UsageError(
            f"{source.setting}: labels go up to {highest}, but there are fewer {source.noun}; "
            "number the classes from 0 without gaps"
        )
    return names or tuple(map(str, range(count)))


def warn_of_unseen_classes(source: DataSource, train: Split, count: int) -> None:
    """Log which of `count` classes no training row has.

    Labels that count from 1 leave one such class, few rows many.
    """
    if unseen := np.setdiff1d(np.arange(count), train.labels).tolist():
        shown = ", ".join(map(str, unseen[:5])) + ", ..." * (len(unseen) > 5)
        _log.warning(
            "%s: of the %d classes, counted from 0, the %d %s to train on do not show %s",
            source.setting,
            count,
            len(train),
            source.noun,
            shown,
        )


def _read_labels(source: DataSource, split: str, table: Any, column: str) -> npt.NDArray[np.int64]:
    """Return a column as labels.

    A csv file with an empty cell has decimals in the whole column: they are taken if they are
    whole.
    """
    import pyarrow

    values = table.select_columns([column]).with_format("arrow")[:].column(column)
    if not len(values):
        raise UsageError(f"{source.setting}: {split} is empty; expected {source.layout}")
    try:
        labels: npt.NDArray[np.int64] = values.cast("int64").fill_null(NO_LABEL).to_numpy()
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{source.setting}: column {column} of {split} holds no labels ({reason}); labels are "
            "whole numbers that count the classes from 0"
        ) from None
    if (labels < 0).sum() > values.null_count:
        raise UsageError(
            f"{source.setting}: {column} of {split} goes down to {labels.min()}; classes count "
            "from 0, so this split is probably one without labels"
        )
    return labels
