"""Splits one after another."""

import numpy as np
import pytest

from flower_blsgd.data.image_split import ImageSplit, JoinedSplit


def split_of(name: str, rows: str) -> ImageSplit:
    """Return a split whose images are letters, and whose labels are their codes."""
    labels = np.array([ord(letter) for letter in rows], np.int64)
    return ImageSplit(name, labels, (), lambda first, last: list(rows[first:last]))


PARTS = [split_of("train", "abc"), split_of("test", "de"), split_of("validation", "fghi")]
LETTERS = "abcdefghi"


@pytest.mark.parametrize("max_samples", [0, 1, 3, 4, 9, 100])
def test_joined_rows_are_those_of_the_parts_in_order(max_samples: int) -> None:
    joined = JoinedSplit("train", PARTS, max_samples)
    expected = LETTERS[:max_samples] if max_samples else LETTERS
    assert len(joined) == len(expected)
    assert joined.labels.tolist() == [ord(letter) for letter in expected]
    for first in range(len(joined)):
        for last in range(first + 1, len(joined) + 1):
            assert "".join(joined.stored(first, last)) == LETTERS[first:last]


def test_places_are_those_in_the_data() -> None:
    joined = JoinedSplit("train", PARTS)
    assert [joined.place(row) for row in (0, 2, 3, 4, 5, 8)] == [
        "image 0 of train",
        "image 2 of train",
        "image 0 of test",
        "image 1 of test",
        "image 0 of validation",
        "image 3 of validation",
    ]
