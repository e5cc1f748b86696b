"""Which columns hold texts and labels, and what is said of rows and labels that are of no use."""

from typing import Any

import numpy as np
import pytest

from flower_blsgd.errors import UsageError

pytest.importorskip("datasets")

from datasets import ClassLabel, Dataset, Features, Value

from flower_blsgd.data.text_columns import TextSplit, text_split

from .text_files import CLASS_NAMES

SAID = "data = 'own'"


def split_of(columns: dict[str, Any], name: str = "train", **settings: Any) -> TextSplit:
    features = settings.pop("features", None)
    table = Dataset.from_dict(columns, features=features)
    return text_split(SAID, name, table, CLASS_NAMES, **settings)


def refusal(columns: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(UsageError) as refused:
        split_of(columns, **settings)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(SAID)
    return message


FOUR: dict[str, list[Any]] = {"text": ["a", "b", "c", "d"], "label": [3, 2, 1, 0]}


@pytest.mark.parametrize("text", ["text", "sentence", "content"])
@pytest.mark.parametrize("label", ["label", "labels"])
def test_names_of_columns(text: str, label: str) -> None:
    split = split_of({"id": [7, 8, 9, 6], label: [0, 1, 2, 3], text: ["a", "b", "c", "d"]})
    assert list(split.labels) == [0, 1, 2, 3]
    assert split.labels.dtype == np.int64
    assert split.read(1, 3) == (["b", "c"], {})
    assert split.class_names == ()


def test_names_of_classes_come_from_the_data() -> None:
    names = ["w", "s", "b", "t"]
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    assert split_of(FOUR, features=features).class_names == tuple(names)


def test_missing_columns() -> None:
    message = refusal({"title": ["a"], "label": [0]})
    assert "no text column in train, found the columns title, label" in message
    assert "no label column in test" in refusal({"text": ["a"], "klass": [0]}, name="test")


def test_a_column_of_numbers_is_no_text() -> None:
    message = refusal({"text": [1, 2, 3, 4], "label": [0, 1, 2, 3]})
    assert "column text of train is int64, no text" in message


def test_empty_split() -> None:
    columns = {"text": np.array([], dtype=str).tolist(), "label": []}
    features = Features({"text": Value("string"), "label": Value("int64")})
    assert "train is empty" in refusal(columns, features=features)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([1, 2, 3, 4], "goes up to 4, but this task has 4 classes, 0 to 3"),
        ([0, 1, 2, -1], "goes down to -1"),
        ([0, 1, 2, 2], "has only the classes 0, 1, 2, but this task has 4"),
        ([None, None, None, None], "column label of train is null"),
        (["a", "b", "c", "d"], "column label of train is string"),
        ([0.0, 1.0, 2.5, 3.0], "row 2 of train has the label 2.5"),
        ([0.0, 1.0, float("inf"), 3.0], "row 2 of train has the label inf, but labels are whole"),
        ([0.0, float("-inf"), 2.0, 3.0], "row 1 of train has the label -inf, but labels"),
        ([0.0, 1.0, 1e300, 3.0], "row 2 of train has the label 1e+300, but labels are whole"),
    ],
)
def test_labels_that_are_not_of_four_classes(labels: list[Any], said: str) -> None:
    assert said in refusal({"text": ["a", "b", "c", "d"], "label": labels})


def test_names_of_another_number_of_classes() -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    columns = {"text": ["a", "b"], "label": [0, 1]}
    message = refusal(columns, features=features)
    assert "label of train has 2 classes (no, yes), but this task has 4" in message


def test_a_test_split_may_lack_classes_but_not_have_more() -> None:
    split = split_of({"text": ["a", "b"], "label": [1, 1]}, name="test")
    assert list(split.labels) == [1, 1]
    assert "goes up to 9" in refusal({"text": ["a", "b"], "label": [1, 9]}, name="test")


def test_bad_rows_are_named_and_not_refused_here() -> None:
    features = Features({"text": Value("binary"), "label": Value("float64")})
    columns = {
        "text": [b"fine", None, b" \n", b"\xff\xfe", "schön".encode(), b"one", b"two", b"three"],
        "label": [0.0, 0.0, 0.0, 0.0, float("nan"), 1.0, 2.0, 3.0],
    }
    split = split_of(columns, features=features)
    texts, wrong = split.read(0, 8)
    assert texts == ["fine", "", "", "", "schön", "one", "two", "three"]
    assert wrong == {
        1: "has no text",
        2: "has no text",
        3: "is no text (invalid start byte)",
        4: "has no label",
    }
    assert split.read(3, 5)[1].keys() == {3, 4}  # counted from the split's first row
    assert list(split.labels) == [0, 0, 0, 0, -1, 1, 2, 3]


def test_missing_whole_labels() -> None:
    split = split_of({"text": list("abcde"), "label": [0, None, 1, 2, 3]})
    assert split.read(0, 5)[1] == {1: "has no label"}


def test_first_rows_only() -> None:
    """The classes are those of all rows: the first may be of one class."""
    split = split_of(FOUR, max_samples=3)
    assert len(split) == 3
    assert list(split.labels) == [3, 2, 1]
    assert split.read(0, 3)[0] == ["a", "b", "c"]
    assert len(split_of(FOUR, max_samples=9)) == 4
