"""How far texts are cut: what is in doubt is not gone on with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_blsgd.data.preparation import PROGRESS_FILES
from flower_blsgd.data.text_columns import TextSplit
from flower_blsgd.data.text_progress import begun_split, record_done, split_key

ROWS, WIDTH = 5, 4


def split_of(labels: list[int] | None = None, name: str = "train") -> TextSplit:
    return TextSplit(name, np.array(labels or [0, 1, 2, 3, 0], np.int64), (), None)


def done_of(part: Path, key: str, width: int = WIDTH, skip_bad: bool = False) -> int:
    return begun_split(part, split_of(), key, width, skip_bad)[1]


@pytest.fixture
def left(tmp_path: Path) -> tuple[Path, str]:
    """Return a folder in which four of five rows are done, the third a bad one, and its key."""
    key = split_key("folder", split_of())
    raw, done = begun_split(tmp_path, split_of(), key, WIDTH, True)
    assert done == 0
    raw.lengths[:4] = [2, 3, 0, 1]
    raw.lengths.flush()
    record_done(tmp_path, "train", key, 4)
    return tmp_path, key


def test_goes_on(left: tuple[Path, str]) -> None:
    part, key = left
    raw, done = begun_split(part, split_of(), key, WIDTH, True)
    assert done == 4
    assert raw.lengths.tolist() == [2, 3, 0, 1, 0]
    assert raw.tokens.shape == (ROWS, WIDTH)


def test_splits_are_recorded_beside_each_other(left: tuple[Path, str]) -> None:
    part, key = left
    record_done(part, "test", "other", 2)
    told = json.loads((part / PROGRESS_FILES[0]).read_text())
    assert told == {"train": {"key": key, "done": 4}, "test": {"key": "other", "done": 2}}


def test_a_row_that_is_missing_is_not_taken_for_a_bad_one(left: tuple[Path, str]) -> None:
    part, key = left
    assert done_of(part, key, skip_bad=False) == 0


def test_other_labels_other_source_and_other_width(left: tuple[Path, str]) -> None:
    part, key = left
    others = [split_key("other", split_of()), split_key("folder", split_of([0, 1, 2, 3, 1]))]
    assert len({key, *others}) == 3
    for other in others:
        assert done_of(part, other, skip_bad=True) == 0
        record_done(part, "train", key, 4)
    assert done_of(part, key, WIDTH + 1, skip_bad=True) == 0


@pytest.mark.parametrize(
    "told", ["x", None, 4, {"done": 4}, *({"done": d} for d in (-1, 6, "4", 4.0, True, None, [4]))]
)
def test_progress_that_cannot_be(told: Any, left: tuple[Path, str]) -> None:
    part, key = left
    if isinstance(told, dict) and told != {"done": 4}:
        told = {**told, "key": key}
    (part / PROGRESS_FILES[0]).write_text(json.dumps({"train": told}))
    assert done_of(part, key, skip_bad=True) == 0
