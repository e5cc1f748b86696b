"""Texts become arrays of tokens: their columns, where they are cut, which rows are left out."""

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")
pytest.importorskip("tokenizers")

from datasets import Dataset
from tokenizers import Tokenizer

from flower_blsgd.data.cache import Prepared
from flower_blsgd.data.samples import TokenizerSource, prepared_texts, vocabulary_of_rows
from flower_blsgd.data.source import DataSource

from ..refusal import refusal
from .text_files import TRAIN, make_texts


def ready(
    folder: Path, tokenizer: TokenizerSource | None = None, max_tokens: int = 128, **rows: Any
) -> Prepared:
    source = DataSource(name="ag-news", noun="texts", num_classes=4, data=str(folder), **rows)
    return prepared_texts(source, tokenizer or vocabulary_of_rows(), max_tokens)


# --- rows and tokens


def letters(marked: bool) -> TokenizerSource:
    """Return a tokenizer of the letters a (which is 5) to h (12), with rules of its own."""

    def make(_: object) -> Any:
        tokenizer = vocabulary_of_rows(marked).make(["a b c d e f g h"] * 2)
        tokenizer.enable_padding(length=16)  # neither must count
        tokenizer.enable_truncation(max_length=4, stride=1)
        return tokenizer

    return TokenizerSource(f"letters {marked}", make)


def test_long_texts_are_cut_and_marks_stay(tmp_path: Path) -> None:
    texts = [("a b c d e f g h a", 0), ("b", 1), ("c d", 2), ("e", 3)]
    folder = make_texts(tmp_path / "own", texts)
    plain = ready(folder, letters(False), max_tokens=4).train[0]
    assert plain.tolist() == [[5, 6, 7, 8], [6, -1, -1, -1], [7, 8, -1, -1], [9, -1, -1, -1]]
    marked = ready(folder, letters(True), max_tokens=5).train[0]
    assert marked.tolist()[:2] == [[2, 5, 6, 7, 3], [2, 6, 3, -1, -1]]
    assert ready(folder, letters(False), max_tokens=16).train[0].shape == (4, 9)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("text", ["  ", "\x00\x01"])
def test_a_text_without_tokens_is_bad(tmp_path: Path, text: str, marked: bool) -> None:
    folder = make_texts(tmp_path / "own", [("a", 3), (text, 1), ("b c", 1), (None, 0)])
    assert refusal(ready, folder, letters(marked)) == (
        f"data = {str(folder)!r}: {folder / 'train.parquet'}, row 2: text cannot be used (no "
        f"tokens in {text!r}); skip-bad = true skips such rows"
    )
    texts = ready(folder, letters(marked), skip_bad=True)
    assert (texts.train[1].tolist(), texts.skipped) == ([3, 1], {"train": 2, "test": 0})


# --- the vocabulary of the training rows


def test_words_that_occur_twice_by_frequency_then_alphabet() -> None:
    texts = ["The Café, the bar.", "a bar; the bar!", "Zebra cafe, apple apple"]
    tokenizer = vocabulary_of_rows().make(texts)
    words = [tokenizer.id_to_token(k) for k in range(tokenizer.get_vocab_size())]
    assert words[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # bar and the three times; a, zebra and . ; ! once
    assert words[5:] == ["bar", "the", ",", "apple", "cafe"]
    encoded = vocabulary_of_rows(marked=True).make(texts).encode("THE CAFÉ, zebra")
    assert encoded.tokens == ["[CLS]", "the", "cafe", ",", "[UNK]", "[SEP]"]


# --- data sets


@pytest.mark.parametrize("kind", ["parquet", "csv", "saved"])
def test_layouts(kind: str, tmp_path: Path) -> None:
    texts = ready(make_texts(tmp_path / "own", kind=kind))
    tokens, labels = texts.train
    assert tokens.shape == (6, 5)  # "Shares of the bank fall" is the longest
    assert labels.tolist() == [0, 1, 2, 3, 0, 2]
    assert texts.test[0].shape == (3, 2)
    assert texts.test[1].tolist() == [0, 1, 2]
    assert (texts.num_classes, texts.noun) == (4, "texts")
    tokenizer = Tokenizer.from_file(str(texts.folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == texts.vocabulary
    assert tokenizer.decode(tokens[4].tolist()) == "a vote a capital"  # the comma occurs once


def test_cache_files_beside_a_saved_table_are_no_rows(tmp_path: Path) -> None:
    """`Dataset.map` writes them there."""
    folder = tmp_path / "own"
    texts, labels = zip(*TRAIN, strict=True)
    Dataset.from_dict({"text": texts, "label": labels}).save_to_disk(str(folder))
    shutil.copy(next(folder.glob("data-*.arrow")), folder / "cache-0123.arrow")
    assert len(ready(folder, needs_test=False).train[1]) == len(TRAIN)


def test_a_tokenizer_is_made_once_of_the_training_rows(tmp_path: Path) -> None:
    seen: list[str] = []

    def make(texts: Any) -> Any:
        seen.extend(texts)
        return vocabulary_of_rows().make(seen)

    folder = make_texts(tmp_path / "own", [*TRAIN, (None, 1)])
    texts = ready(folder, TokenizerSource("own", make), skip_bad=True)
    assert seen == [text for text, _ in TRAIN]
    assert ready(folder, TokenizerSource("own", make), skip_bad=True).folder == texts.folder
    assert len(seen) == len(TRAIN)


@pytest.mark.parametrize(
    ("content", "texts", "labels"),
    [
        ("text,label\n12,None\n0012,NA\n1.50,nan\n", ["12", "0012", "1.50"], [1, 0, 2]),
        ('\ufefftext,label\r\ntrue,x\r\n"a, ""b""\nNone",y\r\n', ["true", 'a, "b"\nNone'], [0, 1]),
        ('{"text": 12, "label": 1}\n{"text": true, "label": 0}', ["12", "true"], [1, 0]),
        ('\ufeff{"text": 12, "label": 0}\n{"text": 7, "label": 1}', ["12", "7"], [0, 1]),
    ],
)
def test_a_text_is_a_text(
    tmp_path: Path, content: str, texts: list[str], labels: list[int]
) -> None:
    """Also if it looks like a number, a truth value or a missing one."""
    file = tmp_path / ("own.jsonl" if "{" in content else "own.csv")
    file.write_text(content, newline="")
    seen: list[str] = []

    def make(texts: Any) -> Any:
        seen.extend(texts)
        return vocabulary_of_rows().make(seen)

    source = DataSource(name="text", noun="texts", data=str(file), needs_test=False)
    found = prepared_texts(source, TokenizerSource("own", make))
    assert (seen, found.train[1].tolist()) == (texts, labels)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("sentence,class\na,x\nb,\n", "row 2: class cannot be used (it is missing); "),
        ("sentence,class\na,x\n,y\n", "row 2: sentence cannot be used (no tokens in ''); "),
        ("sentence,class\na,1\nb,2.5\n", "train-2.csv, row 2: class = '2.5' is not an integer"),
        (
            '{"sentence": "a", "class": "x"}\n{"sentence": "a", "class": 1}\n',
            "row 2: class = 1 has",
        ),
        ('{"sentence": "a", "class": true}\n{"sentence": "a", "class": 1}\n', "row 2: class = 1 "),
        ('{"sentence": "a", "class": 0}\n{"sentence": ["a"], "class": 1}\n', "sentence = ['a'] is"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str, why: str
) -> None:
    """With its file, row and column."""
    own = tmp_path / "own"
    own.mkdir()
    end = "jsonl" if "{" in content else "csv"
    if end == "csv":
        (own / "train-1.csv").write_text("sentence,class\nx,3\n")
    (own / f"train-2.{end}").write_text(content)
    source = DataSource(name="text", noun="texts", data=str(own), needs_test=False)
    message = refusal(prepared_texts, source, vocabulary_of_rows())
    assert f"{own}/train-2.{end}, row 2" in message
    assert "Generating" not in capfd.readouterr().err
    assert why in message
