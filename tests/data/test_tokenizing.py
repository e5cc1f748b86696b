"""Texts become arrays of tokens: where they are cut, what is left out, how it goes on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_blsgd.data import tokenizing
from flower_blsgd.data.text_columns import TextSplit
from flower_blsgd.data.tokenizers import vocabulary_of_rows
from flower_blsgd.data.tokenizing import RawTokens, Tokenized, keep_good, tokenize
from flower_blsgd.errors import UsageError

pytest.importorskip("tokenizers")

WORDS = "a b c d e f g h"


class Rows:
    """Stands for a table with one column."""

    def __init__(self, texts: list[Any]) -> None:
        self.texts = texts

    def __getitem__(self, chosen: slice) -> dict[str, list[Any]]:
        return {"text": self.texts[chosen]}


def split_of(*texts: Any, labels: list[int] | None = None) -> TextSplit:
    numbers = np.array(labels or [k % 4 for k in range(len(texts))], np.int64)
    return TextSplit("train", numbers, (), Rows(list(texts)))


def tokenizer_of(marked: bool = False) -> Any:
    return vocabulary_of_rows(marked).make([WORDS, WORDS])  # a is 5, b is 6, ...


def written(
    split: TextSplit, folder: Path, width: int = 8, marked: bool = False, skip_bad: bool = False
) -> tuple[Tokenized, dict[str, np.ndarray]]:
    raw = RawTokens.new(folder / "scratch", split.name, len(split), width)
    tokenize(split, raw, tokenizer_of(marked), skip_bad, 0, lambda number, done: None)
    result = keep_good(split, raw, folder)
    kinds = ("tokens", "lengths", "labels")
    return result, {kind: np.load(folder / f"train_{kind}.npy") for kind in kinds}


def test_padded_to_the_longest_text(tmp_path: Path) -> None:
    result, arrays = written(split_of("a b", "c", "d e f"), tmp_path)
    assert arrays["tokens"].tolist() == [[5, 6, -1], [7, -1, -1], [8, 9, 10]]
    assert arrays["tokens"].dtype == np.int32
    assert arrays["lengths"].tolist() == [2, 1, 3]
    assert arrays["lengths"].dtype == np.int32
    assert arrays["labels"].tolist() == [0, 1, 2]
    assert arrays["labels"].dtype == np.int64
    assert result == Tokenized(count=3, skipped=0, cut=0, median_tokens=2.0)


def test_long_texts_are_cut_and_their_length_is_kept(tmp_path: Path) -> None:
    result, arrays = written(split_of("a b c d e f g h a", "b"), tmp_path, width=4)
    assert arrays["tokens"].tolist() == [[5, 6, 7, 8], [6, -1, -1, -1]]
    assert arrays["lengths"].tolist() == [9, 1]
    assert result == Tokenized(count=2, skipped=0, cut=1, median_tokens=5.0)


def test_marks_stay_when_a_text_is_cut(tmp_path: Path) -> None:
    _, arrays = written(split_of("a b c d e f g", "b"), tmp_path, width=5, marked=True)
    assert arrays["tokens"].tolist() == [[2, 5, 6, 7, 3], [2, 6, 3, -1, -1]]
    assert arrays["lengths"].tolist() == [9, 3]  # seven words and two marks


def test_rules_of_a_given_tokenizer_are_overridden(tmp_path: Path) -> None:
    split = split_of("a b c", "d")
    tokenizer = tokenizer_of()
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(max_length=2, stride=1)
    raw = RawTokens.new(tmp_path, "train", 2, 8)
    tokenize(split, raw, tokenizer, False, 0, lambda number, done: None)
    assert raw.lengths.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "row 1 of train has no text"),
        ("  ", "row 1 of train has no text"),
        (b"\xff", "row 1 of train is no text (invalid start byte)"),
        ("\x00\x01", "row 1 of train has no token that could be read"),
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_a_bad_row_is_refused_by_its_index_or_left_out(
    text: Any, said: str, marked: bool, tmp_path: Path
) -> None:
    split = split_of("a", text, "b c", labels=[3, 2, 1])
    with pytest.raises(UsageError, match="skip-bad = true leaves such rows out") as refused:
        written(split, tmp_path / "refused", marked=marked)
    assert said in str(refused.value)
    (tmp_path / "kept").mkdir()
    result, arrays = written(split, tmp_path / "kept", marked=marked, skip_bad=True)
    assert (result.count, result.skipped) == (2, 1)
    assert arrays["labels"].tolist() == [3, 1]
    marks = 2 if marked else 0
    assert arrays["lengths"].tolist() == [1 + marks, 2 + marks]


def test_a_row_without_label_is_bad(tmp_path: Path) -> None:
    split = split_of("a", "b", labels=[-1, 2])
    with pytest.raises(UsageError, match="row 0 of train has no label"):
        written(split, tmp_path / "refused")
    (tmp_path / "kept").mkdir()
    assert written(split, tmp_path / "kept", skip_bad=True)[1]["labels"].tolist() == [2]


def test_the_first_bad_row_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="row 1 of train has no token"):
        written(split_of("a", "\x00", None), tmp_path)


def test_no_good_row(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none of the 2 rows of train can be used"):
        written(split_of(None, ""), tmp_path, skip_bad=True)


def test_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "CHUNK", 2)
    texts = ["a", None, "c d", "e", "f g h"]
    split, told = split_of(*texts), []

    class InterruptedError(Exception):
        pass

    def on_rows(number: int, done: int) -> None:
        told.append((number, done))
        if done == 4 and len(told) == 2:
            raise InterruptedError

    raw = RawTokens.new(tmp_path, "train", 5, 4)
    with pytest.raises(InterruptedError):
        tokenize(split, raw, tokenizer_of(), True, 0, on_rows)
    left = RawTokens.left(tmp_path, "train", 5, 4)
    assert left is not None
    split.rows.texts[:4] = ["h"] * 4  # not looked at again
    tokenize(split, left, tokenizer_of(), True, 4, on_rows)
    assert told == [(2, 2), (2, 4), (1, 5)]
    keep_good(split, left, tmp_path)
    expected = [[5, -1, -1], [7, 8, -1], [9, -1, -1], [10, 11, 12]]
    assert np.load(tmp_path / "train_tokens.npy").tolist() == expected


def test_arrays_of_another_shape_are_not_gone_on_with(tmp_path: Path) -> None:
    assert RawTokens.left(tmp_path, "train", 5, 4) is None
    RawTokens.new(tmp_path, "train", 5, 4)
    assert RawTokens.left(tmp_path, "train", 5, 4) is not None
    assert RawTokens.left(tmp_path, "train", 6, 4) is None
    assert RawTokens.left(tmp_path, "train", 5, 3) is None
    path = tmp_path / "raw_train_lengths.npy"
    np.save(path, np.zeros(5, np.int64))
    assert RawTokens.left(tmp_path, "train", 5, 4) is None
    np.save(path, np.zeros(5, np.int32))
    assert RawTokens.left(tmp_path, "train", 5, 4) is not None
    path.write_bytes(path.read_bytes()[:-1])
    size = path.stat().st_size
    assert RawTokens.left(tmp_path, "train", 5, 4) is None
    assert path.stat().st_size == size  # not lengthened
    path.write_bytes(b"cut off")
    assert RawTokens.left(tmp_path, "train", 5, 4) is None
