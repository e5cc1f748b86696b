"""Names of classes, and labels that cannot be meant."""

import numpy as np
import pytest

from flower_blsgd.data.class_names import class_names, tell_of_unused
from flower_blsgd.data.image_split import ImageSplit
from flower_blsgd.errors import UsageError

from ..log_capture import captured_log


def split_of(labels: list[int], *names: str, name: str = "train") -> ImageSplit:
    return ImageSplit(name, np.array(labels, np.int64), names, lambda first, last: [])


def names_of(*splits: ImageSplit, expected: int | None = None) -> tuple[str, ...]:
    return class_names("data = 'own'", splits, expected, "cifar100; name another")


def test_names_are_those_of_the_data_or_numbers() -> None:
    assert names_of(split_of([0, 2], "a", "b", "c"), split_of([1])) == ("a", "b", "c")
    assert names_of(split_of([0, 2]), split_of([3], name="test")) == ("0", "1", "2", "3")


def test_other_names() -> None:
    with pytest.raises(UsageError, match="train and test have different classes; both need the"):
        names_of(split_of([0, 1], "a", "b"), split_of([0, 1], "b", "a"))


def test_labels_beyond_the_names() -> None:
    with pytest.raises(UsageError) as refused:
        names_of(split_of([0, 1], "a", "b"), split_of([0, 5], name="test"))
    assert str(refused.value) == (
        "data = 'own': test has the label 5, but there are 2 names of classes, counted from 0; "
        "mend the labels or the names"
    )


def test_wrong_number() -> None:
    with pytest.raises(UsageError) as refused:
        names_of(split_of([0, 30_000_000]), expected=100)
    assert str(refused.value) == (
        "data = 'own': wrong number of classes: found 30000001, expected the 100 of cifar100; "
        "name another"
    )


def test_labels_far_beyond_the_classes_that_occur() -> None:
    """No tuple of so many names is made: that took a minute and 5 GB."""
    with pytest.raises(UsageError, match="labels go up to 2000000000, but only 3 different ones"):
        names_of(split_of([0, 1, 2_000_000_000]))
    assert len(names_of(split_of([0, 999]))) == 1000  # a small part of many classes
    with pytest.raises(UsageError, match="labels go up to 1000, but only 2 different ones occur"):
        names_of(split_of([0, 1000]))
    assert len(names_of(split_of(list(range(0, 2000, 10))))) == 1991


def test_classes_that_no_image_shows_are_told() -> None:
    with captured_log() as log:
        tell_of_unused("data = 'own'", "train", np.array([0, 1, 2]), 3)
        tell_of_unused("data = 'own'", "train", np.array([1, 2, 3]), 4)
        tell_of_unused("data = 'own'", "train", np.array([9]), 10)
    told = "data = 'own': no image of train has the label"
    assert log.warnings == [
        f"{told} 0; there are 4 classes, and labels count from 0",
        f"{told} 0, 1, 2, 3, 4, ...; there are 10 classes, and labels count from 0",
    ]
