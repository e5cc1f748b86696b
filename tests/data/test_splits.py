"""Splits of labelled samples: their columns, labels and classes."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")

import datasets

from flower_blsgd.data.source import DataSource
from flower_blsgd.data.splits import (
    NO_LABEL,
    Split,
    find_classes,
    join_splits,
    table_split,
    warn_of_unseen_classes,
)

from ..log_capture import captured_log
from ..refusal import refusal

LAYOUT = "train-*.parquet and test-*.parquet"
SOURCE = DataSource("hub/x", None, LAYOUT)


# --- joined splits


def letters(name: str, rows: str) -> Split:
    """Return a split whose samples are letters, and whose labels are their codes."""
    labels = np.array([ord(letter) for letter in rows], np.int64)
    return Split(name, labels, ("x",), lambda first, last: list(rows[first:last]))


@pytest.mark.parametrize("max_samples", [0, 4, 100])
def test_joined_rows_are_those_of_the_splits_in_order(max_samples: int) -> None:
    splits = [letters("train", "abc"), letters("test", "de"), letters("validation", "fghi")]
    joined = join_splits(splits, max_samples)
    expected = "abcdefghi"[: max_samples or None]
    assert (joined.name, joined.class_names) == ("train + test + validation", ("x",))
    assert joined.labels.tolist() == [ord(letter) for letter in expected]
    for first in range(len(joined)):
        for last in range(first + 1, len(joined) + 1):
            assert "".join(joined.stored(first, last)) == expected[first:last]


# --- columns and labels


def table_of(rows: dict[str, list[Any]], **features: Any) -> Any:
    own = datasets.Features(features) if features else None
    return datasets.Dataset.from_dict(rows, features=own)


def labels_of(labels: list[Any], **features: Any) -> list[int]:
    table = table_of({"text": ["a"] * len(labels), "label": labels}, **features)
    found = table_split(SOURCE, "test", table, "text", "label").labels
    assert found.dtype == np.int64
    result: list[int] = found.tolist()
    return result


def test_labels_are_whole_numbers_and_may_be_missing() -> None:
    assert labels_of([2, 0, 1]) == [2, 0, 1]
    assert labels_of([0, None, 3]) == [0, NO_LABEL, 3]
    assert labels_of([0.0, None, 3.0]) == [0, NO_LABEL, 3]  # as csv files have them
    assert labels_of([0, 1], text=datasets.Value("string"), label=datasets.Value("uint8")) == [0, 1]


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ([0, 1, -1], "label of test goes down to -1; classes count from 0, so this split is"),
        ([0.0, 2.5], "column label of test holds no labels (Float value 2.5"),
        (["cat", "dog"], "column label of test holds no labels (Failed to parse"),
        ([], "test is empty; expected"),
    ],
)
def test_labels_that_are_none(labels: list[Any], why: str) -> None:
    assert f"data = '': {why}" in refusal(lambda: labels_of(labels))


# --- classes


def split_of(labels: list[int], *names: str, name: str = "train") -> Split:
    return Split(name, np.array(labels, np.int64), names, lambda first, last: [])


def classes_of(*splits: Split, expected: int | None = None) -> tuple[str, ...]:
    return find_classes(SOURCE, "cifar100", splits, expected)


def test_names_of_classes_are_those_of_the_data_or_numbers() -> None:
    assert classes_of(split_of([0, 2], "a", "b", "c"), split_of([1])) == ("a", "b", "c")
    assert classes_of(split_of([0, 2, NO_LABEL]), split_of([3])) == ("0", "1", "2", "3")
    assert classes_of(split_of([0, 3]), expected=4) == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("splits", "expected", "why"),
    [
        (
            [split_of([0, 1], "a", "b"), split_of([0, 1], "b", "a", name="test")],
            None,
            "train and test have different classes; they need the same, in the same order",
        ),
        (
            [split_of([0, 1], "a", "b"), split_of([0, 5])],
            None,
            "there is a label 5, but 2 names of classes, counted from 0; correct the labels or",
        ),
        (
            [split_of([0, 30_000_000])],
            100,
            "wrong number of classes: found 30000001, expected the 100 of cifar100, counted from "
            "0; name a folder with these, or leave data empty for the HF hub's hub/x",
        ),
        # No tuple of so many names is made: that would take a minute and 5 GB.
        ([split_of([0, 2_000_000_000])], None, "labels go up to 2000000000, but there are fewer i"),
        ([split_of([0, 0])], None, f"all images have the same label; expected {LAYOUT}"),
    ],
)
def test_classes_that_cannot_be_meant(splits: list[Split], expected: int | None, why: str) -> None:
    assert refusal(lambda: classes_of(*splits, expected=expected)).startswith(f"data = '': {why}")


def test_classes_that_no_training_row_shows_are_named() -> None:
    with captured_log() as log:
        warn_of_unseen_classes(SOURCE, split_of([0, 1, 2]), 3)
        warn_of_unseen_classes(SOURCE, split_of([1, 2, 3, NO_LABEL]), 4)
        warn_of_unseen_classes(SOURCE, split_of([9]), 10)
    assert log.warnings == [
        "data = '': of the 4 classes, counted from 0, the 4 images to train on do not show 0",
        "data = '': of the 10 classes, counted from 0, the 1 images to train on do not show 0, 1, "
        "2, 3, 4, ...",
    ]
