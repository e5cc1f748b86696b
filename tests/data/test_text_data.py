"""Texts become arrays of tokens: their columns, where they are cut, which rows are left out."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")
pytest.importorskip("tokenizers")

from tokenizers import Tokenizer

from flower_blsgd.data import text_data
from flower_blsgd.data.cache import Prepared
from flower_blsgd.data.splits import Split
from flower_blsgd.data.text_data import (
    TextData,
    TokenizerSource,
    prepared_texts,
    tokenize_split,
    vocabulary_of_rows,
)

from ..refusal import refusal
from .text_files import CLASS_NAMES, TRAIN, make_texts

NUMBERS = [(k, k) for k in range(4)]
OWN = TextData("own-texts", "nobody/own_texts", CLASS_NAMES)


def ready(folder: Path, tokenizer: TokenizerSource | None = None, **settings: Any) -> Prepared:
    return prepared_texts(OWN, tokenizer or vocabulary_of_rows(), str(folder), **settings)


# --- rows and tokens


def split_of(texts: list[Any], labels: list[int] | None = None) -> Split:
    numbers = np.array(labels or [k % 4 for k in range(len(texts))], np.int64)
    return Split("train", numbers, (), lambda first, last: texts[first:last])


def tokenized(
    folder: Path,
    texts: list[Any],
    labels: list[int] | None = None,
    *,
    width: int = 8,
    marked: bool = False,
    skip_bad: bool = False,
) -> tuple[list[list[int]], list[int]]:
    """Return the tokens and labels of texts of the letters a (which is 5) to h (12)."""
    tokenizer = vocabulary_of_rows(marked).make(["a b c d e f g h"] * 2)
    tokenizer.enable_padding(length=16)  # rules of its own, which must not count
    tokenizer.enable_truncation(max_length=4, stride=1)
    split = split_of(texts, labels)
    done: list[int] = []
    skipped = tokenize_split(split, folder, tokenizer, width, skip_bad, done.append)
    tokens, kept = (np.load(folder / f"train_{kind}.npy") for kind in ("tokens", "labels"))
    assert (tokens.dtype, kept.dtype) == (np.int32, np.int64)
    assert (skipped, sum(done)) == (len(texts) - len(kept), len(texts))
    return tokens.tolist(), kept.tolist()


@pytest.mark.parametrize("chunk", [2, 4096])
def test_rows_are_as_wide_as_the_longest_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(text_data, "_CHUNK", chunk)
    tokens, labels = tokenized(tmp_path, ["a b", "c", "d e f"])
    assert tokens == [[5, 6, -1], [7, -1, -1], [8, 9, 10]]
    assert labels == [0, 1, 2]
    tokens, labels = tokenized(tmp_path, ["a", None, "c d", "\x00", "f g h"], skip_bad=True)
    assert tokens == [[5, -1, -1], [7, 8, -1], [10, 11, 12]]
    assert labels == [0, 2, 0]


def test_long_texts_are_cut_and_marks_stay(tmp_path: Path) -> None:
    texts = ["a b c d e f g h a", "b"]
    assert tokenized(tmp_path, texts, width=4)[0] == [[5, 6, 7, 8], [6, -1, -1, -1]]
    cut = [[2, 5, 6, 7, 3], [2, 6, 3, -1, -1]]
    assert tokenized(tmp_path, texts, width=5, marked=True)[0] == cut


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("text", "label", "why"),
    [
        ("  ", 1, "has no text"),
        ("b", -1, "has no label"),
        ("\x00\x01", 1, "has no token that could be read"),
    ],
)
def test_a_bad_row_is_refused_by_its_number_or_left_out(
    tmp_path: Path, text: Any, label: int, why: str, marked: bool
) -> None:
    texts, labels = ["a", text, "b c", None], [3, label, 1, 0]
    message = refusal(lambda: tokenized(tmp_path, texts, labels, marked=marked))
    assert message == f"data: row 1 of train {why}; skip-bad = true leaves such rows out"
    _, kept = tokenized(tmp_path, texts, labels, marked=marked, skip_bad=True)
    assert kept == [3, 1]
    message = refusal(lambda: tokenized(tmp_path, [text], [label], marked=marked, skip_bad=True))
    assert message == "data: none of the 1 rows of train can be used"


# --- the vocabulary of the training rows

VOCABULARY_TEXTS = ["The Café, the bar.", "a bar; the bar!", "Zebra cafe, apple apple"]


def made_of(texts: Sequence[str], marked: bool = False) -> Any:
    return vocabulary_of_rows(marked).make(texts)


def test_words_that_occur_twice_by_frequency_then_alphabet() -> None:
    tokenizer = made_of(VOCABULARY_TEXTS)
    words = [tokenizer.id_to_token(k) for k in range(tokenizer.get_vocab_size())]
    assert words[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # bar and the three times; a, zebra and . ; ! once
    assert words[5:] == ["bar", "the", ",", "apple", "cafe"]
    encoded = made_of(VOCABULARY_TEXTS, marked=True).encode("THE CAFÉ, zebra")
    assert encoded.tokens == ["[CLS]", "the", "cafe", ",", "[UNK]", "[SEP]"]


@pytest.mark.processes
def test_equal_in_every_process() -> None:
    """Nodes prepare their own data, and must agree: no hash seed may show."""
    code = (
        "from flower_blsgd.data.text_data import vocabulary_of_rows\n"
        "texts = [' '.join(f'w{k * j % 977}' for k in range(40)) for j in range(300)]\n"
        "print(vocabulary_of_rows(True).make(texts).to_str())"
    )
    written = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(written) == 1
    assert len(written.pop()) > 10_000


# --- data sets


@pytest.mark.parametrize("kind", ["parquet", "csv", "saved"])
def test_layouts(kind: str, tmp_path: Path) -> None:
    texts = ready(make_texts(tmp_path / "own", kind=kind))
    tokens, labels = texts.train
    assert tokens.shape == (6, 5)  # "Shares of the bank fall" is the longest
    assert labels.tolist() == [0, 1, 2, 3, 0, 2]
    assert texts.test[0].shape == (3, 2)
    assert texts.test[1].tolist() == [0, 1, 2]
    assert (texts.class_names, texts.noun) == (CLASS_NAMES, "texts")
    tokenizer = Tokenizer.from_file(str(texts.folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == texts.facts["vocabulary"]
    assert tokenizer.decode(tokens[4].tolist()) == "a vote a capital"  # the comma occurs once
    arrays = {f"{part}_{what}.npy" for part in ("train", "test") for what in ("tokens", "labels")}
    expected = arrays | {"meta.json", "tokenizer.json"}
    assert {path.name for path in texts.folder.iterdir()} == expected


def test_tokenizer_and_settings_make_other_entries(tmp_path: Path) -> None:
    folder = make_texts(tmp_path / "own")
    entries = [
        ready(folder),
        ready(folder, vocabulary_of_rows(marked=True)),
        ready(folder, max_tokens=3),
        ready(folder, max_samples=4),
        ready(folder, skip_bad=True),
    ]
    assert len({texts.folder for texts in entries}) == 5
    assert ready(folder).folder == entries[0].folder
    assert entries[0].fingerprint == entries[4].fingerprint != entries[1].fingerprint
    assert entries[2].train[0].shape == (6, 3)
    assert entries[3].train[1].tolist() == [0, 1, 2, 3]
    assert entries[3].test[1].tolist() == [0, 1, 2]


def test_a_tokenizer_is_made_once_of_the_good_training_rows(tmp_path: Path) -> None:
    seen: list[str] = []

    def make(texts: Any) -> Any:
        seen.extend(texts)
        return vocabulary_of_rows().make(seen)

    folder = make_texts(tmp_path / "own", [*TRAIN, (None, 1), ("left out", None)])
    texts = ready(folder, TokenizerSource("own", make), skip_bad=True)
    assert seen == [text for text, _ in TRAIN]
    assert texts.skipped == {"train": 2, "test": 0}
    assert ready(folder, TokenizerSource("own", make), skip_bad=True).folder == texts.folder
    assert len(seen) == len(TRAIN)


def test_names_of_classes(tmp_path: Path) -> None:
    folder = make_texts(tmp_path / "own", names=["w", "s", "b", "t"], kind="saved")
    assert ready(folder).class_names == ("w", "s", "b", "t")
    other = make_texts(tmp_path / "other", names=["s", "w", "b", "t"], kind="saved")
    shutil.rmtree(folder / "test")
    (other / "test").rename(folder / "test")
    assert "train and test have different classes" in refusal(lambda: ready(folder))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"text": "sentence"}, "no text column in train, found the columns sentence, label; exp"),
        ({"label": "stars"}, "no label column in train, found the columns text, stars; expected"),
        ({"train": NUMBERS, "test": NUMBERS}, "column text of train is int64, no text; expected"),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    folder = make_texts(tmp_path / "own", **settings)
    assert why in refusal(lambda: ready(folder))
