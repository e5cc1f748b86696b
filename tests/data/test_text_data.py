"""Texts prepared once: what the cache holds, what makes another entry, how it goes on."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")
pytest.importorskip("tokenizers")

from tokenizers import Tokenizer

from flower_blsgd.data import text_data, tokenizing
from flower_blsgd.data.entry import Prepared
from flower_blsgd.data.text_data import TextData, prepared_texts
from flower_blsgd.data.text_progress import record_done
from flower_blsgd.data.tokenizers import TokenizerSource, vocabulary_of_rows
from flower_blsgd.errors import UsageError

from .text_files import CLASS_NAMES, TEST, TRAIN, make_texts

OWN = TextData("own-texts", "nobody/own_texts", CLASS_NAMES)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def ready(folder: Path, tokenizer: TokenizerSource | None = None, **settings: Any) -> Prepared:
    return prepared_texts(OWN, tokenizer or vocabulary_of_rows(), str(folder), **settings)


@pytest.mark.parametrize("kind", ["parquet", "csv", "saved"])
def test_layouts(kind: str, tmp_path: Path) -> None:
    texts = ready(make_texts(tmp_path / "own", kind=kind))
    tokens, labels = texts.train
    assert tokens.shape == (6, 5)  # "Shares of the bank fall" is the longest
    assert tokens.dtype == np.int32
    assert isinstance(tokens, np.memmap)
    assert labels.tolist() == [0, 1, 2, 3, 0, 2]
    assert texts.test[0].shape == (3, 2)
    assert texts.test[1].tolist() == [0, 1, 2]
    assert texts.class_names == CLASS_NAMES
    assert texts.noun == "texts"
    assert texts.array("train_lengths").tolist() == [5, 5, 5, 5, 5, 5]
    assert texts.array("test_lengths").tolist() == [2, 2, 2]
    assert texts.facts["texts_cut"] == {"train": 0, "test": 0}
    assert texts.facts["median_tokens"] == {"train": 5.0, "test": 2.0}
    tokenizer = Tokenizer.from_file(str(texts.folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == texts.facts["vocabulary"]
    assert tokenizer.decode(tokens[4].tolist()) == "a vote a capital"  # the comma occurs once


def test_nothing_but_arrays_tokenizer_and_meta_is_left(tmp_path: Path, cache: Path) -> None:
    texts = ready(make_texts(tmp_path / "own"))
    arrays = {f"{s}_{k}.npy" for s in ("train", "test") for k in ("tokens", "lengths", "labels")}
    assert {path.name for path in texts.folder.iterdir()} == arrays | {
        "meta.json",
        "tokenizer.json",
    }
    assert [path for path in cache.iterdir() if path.name.startswith(".part")] == []


def test_tokenizer_and_length_are_part_of_the_key(tmp_path: Path) -> None:
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
    assert entries[2].facts["texts_cut"] == {"train": 6, "test": 0}
    assert entries[2].facts["median_tokens"] == {"train": 5.0, "test": 2.0}
    assert entries[3].train[1].tolist() == [0, 1, 2, 3]
    assert entries[3].test[1].tolist() == [0, 1, 2]


def test_tokenizer_is_made_of_the_good_training_rows(tmp_path: Path) -> None:
    seen: list[str] = []

    def make(texts: Any) -> Any:
        seen.extend(texts)
        return vocabulary_of_rows().make(seen)

    rows = [*TRAIN, (None, 1), ("left out", None)]
    folder = make_texts(tmp_path / "own", rows)
    texts = ready(folder, TokenizerSource("told apart", make), skip_bad=True)
    assert seen == [text for text, _ in TRAIN]
    assert texts.skipped == {"train": 2, "test": 0}
    again = ready(folder, TokenizerSource("told apart", None), skip_bad=True)  # type: ignore[arg-type]
    assert again.folder == texts.folder


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_rows_without_text_or_label(kind: str, tmp_path: Path, cache: Path) -> None:
    folder = make_texts(tmp_path / "own", test=[*TEST, ("The rain", None), (None, 2)], kind=kind)
    with pytest.raises(UsageError, match="row 3 of test has no label"):
        ready(folder)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    texts = ready(folder, skip_bad=True)
    assert texts.skipped == {"train": 0, "test": 2}
    assert texts.test[1].tolist() == [0, 1, 2]


def test_names_of_classes(tmp_path: Path) -> None:
    folder = make_texts(tmp_path / "own", names=["w", "s", "b", "t"])
    assert ready(folder).class_names == ("w", "s", "b", "t")


def test_splits_of_different_classes(tmp_path: Path) -> None:
    folder = make_texts(tmp_path / "own", names=["w", "s", "b", "t"], kind="saved")
    other = make_texts(tmp_path / "other", names=["s", "w", "b", "t"], kind="saved")
    shutil.rmtree(folder / "test")
    (other / "test").rename(folder / "test")
    with pytest.raises(UsageError, match="train and test have different classes"):
        ready(folder)


def test_missing_split_and_folder(tmp_path: Path) -> None:
    folder = make_texts(tmp_path / "own")
    (folder / "test.parquet").unlink()
    with pytest.raises(UsageError, match="no test split, found train; expected train-"):
        ready(folder)
    with pytest.raises(UsageError, match="does not exist; name a folder with train-"):
        ready(tmp_path / "none")


def test_goes_on_after_an_interruption(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed behind the first chunk of the test split: no training row is cut again."""
    folder = make_texts(tmp_path / "own")
    whole = ready(folder)
    expected = [np.array(part) for part in (*whole.train, *whole.test)]
    monkeypatch.setattr(tokenizing, "CHUNK", 2)
    real, begins = text_data.record_done, []

    def killed(part: Path, name: str, key: str, done: int) -> None:
        real(part, name, key, done)
        if (name, done) == ("test", 2):
            raise KeyboardInterrupt

    def make(texts: Any) -> Any:
        begins.append("tokenizer")
        return vocabulary_of_rows().make(texts)

    source = TokenizerSource("interrupted", make)
    monkeypatch.setattr(text_data, "record_done", killed)
    with pytest.raises(KeyboardInterrupt):
        ready(folder, source)
    monkeypatch.setattr(text_data, "record_done", real)
    cut = []
    tokenized = text_data.tokenize

    def counted(split: Any, raw: Any, tokenizer: Any, skip: bool, done: int, tell: Any) -> None:
        cut.append((split.name, done))
        tokenized(split, raw, tokenizer, skip, done, tell)

    monkeypatch.setattr(text_data, "tokenize", counted)
    texts = ready(folder, source)
    assert cut == [("train", 6), ("test", 2)]
    assert begins == ["tokenizer"]
    for found, wanted in zip((*texts.train, *texts.test), expected, strict=True):
        assert np.array_equal(found, wanted)
    assert texts.fingerprint == whole.fingerprint


def interrupted(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Interrupt when four training rows are done; return the folder that is left."""
    monkeypatch.setattr(tokenizing, "CHUNK", 2)

    def killed(part: Path, name: str, key: str, done: int) -> None:
        record_done(part, name, key, done)
        if done == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(text_data, "record_done", killed)
        with pytest.raises(KeyboardInterrupt):
            ready(folder)
    (part,) = (path for path in cache.iterdir() if path.is_dir())
    return part


@pytest.mark.parametrize("what", ["cut off", "emptied", "tokenizer"])
def test_what_is_damaged_after_an_interruption_is_made_again(
    what: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_texts(tmp_path / "own")
    part = interrupted(folder, cache, monkeypatch)
    lengths = part / "source" / "raw_train_lengths.npy"
    if what == "cut off":
        lengths.write_bytes(lengths.read_bytes()[:-20])  # one of six lengths is left
    elif what == "emptied":
        lengths.write_bytes(lengths.read_bytes()[:-24] + bytes(24))
    else:
        (part / "tokenizer.json").unlink()
    texts = ready(folder)
    assert texts.skipped == {"train": 0, "test": 0}
    assert texts.array("train_lengths").tolist() == [5, 5, 5, 5, 5, 5]
    assert (texts.train[0][:, 0] >= 0).all()
