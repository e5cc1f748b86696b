"""From tables to arrays: columns, labels, classes, and the rows that are left out."""

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")

from datasets import ClassLabel, Dataset

from flower_blsgd.data import splits as module
from flower_blsgd.data.source import DataSource
from flower_blsgd.data.splits import read_parts, write_part

from ..log_capture import captured_log
from ..refusal import refusal

SOURCE = DataSource(
    name="cifar100",
    hf_hub_name="hub/x",
    noun="texts",
)


def table(rows: str, labels: Sequence[Any] = (), names: Sequence[str] = ()) -> Dataset:
    """Return a split of letters, labelled 0, 1, 2, ... if there are no other labels."""
    columns = {"text": list(rows), "more": list(rows), "label": labels or list(range(len(rows)))}
    made = Dataset.from_dict(columns)
    return made.cast_column("label", ClassLabel(names=list(names))) if names else made


def read(
    tables: Mapping[str, Any],
    parts: Mapping[str, Sequence[str]] | None = None,
    num_classes: int | None = None,
    max_samples: int = 0,
) -> tuple[dict[str, Any], int]:
    names = parts or {"train": ("train",), "test": (list(tables)[-1],)}
    source = replace(SOURCE, num_classes=num_classes, max_samples=max_samples, **names)
    return read_parts(source, tables)


# --- parts of a data set


@pytest.mark.parametrize("max_samples", [0, 4, 100])
def test_joined_rows_are_those_of_the_splits_in_order(max_samples: int) -> None:
    tables = {"test": table("de"), "other": table("x"), "train": table("abc")}
    parts = {"train": ("train", "test"), "test": ("test",)}
    found, num_classes = read(tables, parts, max_samples=max_samples)
    assert "".join(found["train"]["sample"]) == "abcde"[: max_samples or None]
    assert found["train"]["label"][:] == [0, 1, 2, 0, 1][: max_samples or None]
    assert (found["test"]["sample"][:], num_classes) == (["d", "e"], 3)
    tables["test"] = table("de", [0, 1], "abc")
    assert "train and test cannot be joined (" in refusal(read, tables, parts)


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"train": table("ab"), "eval": table("ab")}, "no test split, found train, eval; expected"),
        ({"train": table("ab").remove_columns("text")}, "train has 2 rows of the columns more, la"),
        ({"train": table("ab").remove_columns("label")}, "train has 2 rows of the columns text, m"),
        ({"train": table("ab").select([])}, "train has 0 rows of the columns text, more, label; e"),
    ],
)
def test_splits_and_columns_that_are_not_there(tables: Mapping[str, Any], why: str) -> None:
    message = refusal(read, tables, {"train": ["train"], "test": ["test"]})
    assert message.startswith(f"data = '': {why}")
    assert message.endswith(f"expected {SOURCE.layout}")


@pytest.mark.parametrize(
    ("tables", "expected", "found"),
    [
        ({"train": table("ab", [0, 2], "abcd"), "test": table("a", [1])}, None, 4),
        ({"train": table("ab", [0, None]), "test": table("abc", [2, 1, 1])}, None, 3),
        ({"train": table("ab", [0.0, None])}, 1, 1),  # as csv files have them
        ({"train": table("ab", [0, 3])}, 4, 4),
    ],
)
def test_classes_are_counted_in_all_rows(
    tables: Mapping[str, Any], expected: int | None, found: int
) -> None:
    assert read(tables, num_classes=expected, max_samples=1)[1] == found


@pytest.mark.parametrize(
    ("tables", "expected", "why"),
    [
        (
            {"train": table("ab", [0, 1], "ab"), "test": table("ab", [0, 1], "ba")},
            None,
            "train and test have different classes; they need the same, in the same order",
        ),
        (
            {"train": table("ab", [0, 1], "ab"), "test": table("ab", [0, 5])},
            None,
            "wrong number of classes: found 2 and labels up to 5, expected at least 2, counted",
        ),
        (
            {"train": table("ab", [0, 30])},
            100,
            "wrong number of classes: found 31 and labels up to 30, expected the 100 of cifar100",
        ),
        ({"train": table("ab", [0.0, 2.5])}, None, "row 2 of train: label = 2.5 is not an integer"),
        (
            {"train": table("ab", [0, 1], "ab"), "test": table("a", ["a"])},
            None,
            "labels must be integers that number the",
        ),
        (
            {"train": table("ab", [0, 1]), "test": table("a", [3])},
            None,
            "test has classes that train does not have: 3; use the same classes in both",
        ),
        (
            {"train": table("ab", [[0], [1]])},
            None,
            "row 1 of train: label = [0] has another type than the labels before, or no simple one",
        ),
    ],
)
def test_classes_that_cannot_be_meant(
    tables: Mapping[str, Any], expected: int | None, why: str
) -> None:
    message = refusal(read, tables, num_classes=expected)
    assert message.startswith(f"data = '': {why}")


@pytest.mark.parametrize(
    ("labels", "test", "expected", "numbers"),
    [
        ([-1, 1], [1], None, [[0, 1], [1]]),
        ([1, -1, 0], [-1], None, [[2, 0, 1], [0]]),
        ([0, 1], [-1, 1], None, [[0, 1], [-1, 1]]),  # a class that is not trained is none
        ([0, 10], [10], None, [[0, 1], [1]]),
        ([3, 1, 2], [2.0], None, [[2, 0, 1], [1]]),
        ([0, 2], [2], 3, [[0, 2], [2]]),  # the task knows its classes
        ([0.0, None, 1.0], [1], None, [[0, -1, 1], [1]]),
        ([float("nan"), 0.0, 1.0], [1], None, [[-1, 0, 1], [1]]),
        ([True, False], [True], None, [[1, 0], [1]]),
        (["10", "2", "0"], [2], None, [[2, 1, 0], [1]]),
        (["007", "7", ""], ["7"], None, [[0, 1, -1], [1]]),
        (["None", "NA", None], ["NA"], None, [[1, 0, -1], [0]]),
    ],
)
def test_a_class_is_what_the_file_says(
    labels: list[Any], test: list[Any], expected: int | None, numbers: list[list[int]]
) -> None:
    tables = {"train": table("abc"[: len(labels)], labels), "test": table("ab"[: len(test)], test)}
    if expected:
        tables["train"] = tables["train"].add_item({"text": "c", "more": "c", "label": 1})
        numbers[0].append(1)
    with captured_log() as log:
        found, _ = read(tables, num_classes=expected)
    assert [found[part]["label"][:] for part in ("train", "test")] == numbers
    renumbered = labels in ([-1, 1], [1, -1, 0], [0, 10], [3, 1, 2], ["10", "2", "0"])
    assert len(log.warnings) == renumbered
    assert all("are numbered from 0" in line for line in log.warnings)


# --- arrays of a part


def written(
    folder: Path, texts: list[Any], labels: list[Any] | None = None, skip_bad: bool = False
) -> tuple[list[list[int]], list[int]]:
    """Return the rows and labels of lists of digits, of which 9 cannot be converted."""

    def convert(text: str) -> list[int]:
        if "9" in text:
            raise ValueError(f"bad text\n{text}")
        return [int(digit) for digit in text]

    count, source = len(texts), replace(SOURCE, skip_bad=skip_bad)
    columns = {"sample": texts, "label": labels or list(range(count))}
    columns |= {"split": ["other"] * count, "row": list(range(9, 9 + count))}
    names = {"other": ("sentence", "class")}
    rows = Dataset.from_dict(columns)
    skipped = write_part(rows, folder, "test", convert, (4,), np.int32, source, names, filler=-1)
    inputs, kept = (np.load(folder / f"test_{kind}.npy") for kind in ("inputs", "labels"))
    assert (inputs.dtype, kept.dtype, skipped) == (np.int32, np.int64, len(texts) - len(kept))
    return inputs.tolist(), kept.tolist()


def test_rows_are_as_long_as_the_longest(tmp_path: Path) -> None:
    assert written(tmp_path, ["12", "3", "456"]) == (
        [[1, 2, -1], [3, -1, -1], [4, 5, 6]],
        [0, 1, 2],
    )
    assert written(tmp_path, ["1234", "3"])[0] == [[1, 2, 3, 4], [3, -1, -1, -1]]
    many = [str(k)[-1:].replace("9", "0") * (k % 3 + 1) for k in range(200)]  # of several chunks
    inputs, labels = written(tmp_path, many)
    assert ["".join(str(k) for k in row if k >= 0) for row in inputs] == many
    assert labels == list(range(200))


@pytest.mark.parametrize(
    ("text", "label", "why"),
    [
        ("9", 1, "sentence cannot be used (bad text)"),
        ("1", None, "class cannot be used (it is missing)"),
        ("1", -1, "class cannot be used (it is missing)"),
        (None, 1, "sentence cannot be used (it is missing)"),
    ],
)
def test_a_bad_row_is_refused_by_its_number_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: Any, label: int | None, why: str
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 2)
    texts, labels = ["1", text, "23", "9", "4"], [3, label, 1, 0, 2]
    message = refusal(written, tmp_path, texts, labels)
    assert message == f"data = '': row 11 of other: {why}; skip-bad = true skips such rows"
    with captured_log() as log:
        kept = written(tmp_path, texts, labels, skip_bad=True)
    assert kept == ([[1, -1], [2, 3], [4, -1]], [3, 1, 2])
    assert log.warnings == ["skipped 2 of 5 rows of test that cannot be used"]
    message = refusal(written, tmp_path, [text], [label], skip_bad=True)
    assert message == "data = '': none of the 1 rows of test can be used"


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="there is none on this system")
def test_a_full_disk_is_noticed_before_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory map that outgrows its disk would kill the process."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        written(tmp_path, ["1"])
