"""Labelled texts, cut into tokens once per machine."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .cache import SCRATCH, Contents, OnItems, Preparation, Prepared, prepared
from .source import DataSource, find_source
from .splits import (
    NO_LABEL,
    Split,
    find_classes,
    find_column,
    join_splits,
    table_split,
    warn_of_unseen_classes,
)

TOKENIZER_FILE = "tokenizer.json"
"""In a cache entry: the tokenizer that its tokens come from."""

NO_TOKEN = -1
"""Fills a row behind the end of its text."""

PAD, UNKNOWN, FIRST, LAST, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
LARGEST_VOCABULARY = 30_522
"""As large as BERT's."""

_FEWEST_USES = 2
_RULE = 1
"""Changes when a vocabulary would come out in another way."""

_LAYOUT = "train-*.parquet and test-*.parquet, or .csv, with columns text and label"
_CHUNK = 4096
"""Rows that are cut into tokens at a time."""


@dataclass(frozen=True)
class TextData:
    """A data set of texts.

    Parameters
    ----------
    name : str
        The task, such as ``"ag-news"``.
    hf_hub_name : str
        What the Hugging Face hub calls it.
    class_names : tuple of str
        One for each label.
    """

    name: str
    hf_hub_name: str
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class TokenizerSource:
    """Where a tokenizer comes from.

    Parameters
    ----------
    identity : str
        Equal only for sources that give equal tokens of equal training rows: what is prepared
        with another is not used.
    make : callable
        ``(training texts) -> tokenizers.Tokenizer``. Called only where texts must be prepared.
    """

    identity: str
    make: Callable[[Iterable[str]], Any]


def vocabulary_of_rows(marked: bool = False) -> TokenizerSource:
    """Return the tokenizer that knows the words of the training rows.

    Texts become lower case without accents; a word or a punctuation mark is a token if it occurs
    at least twice, of these the 30,522 most frequent, ties in alphabetical order. So equal rows
    give an equal tokenizer on every machine, which the library's WordPiece does not.

    Parameters
    ----------
    marked : bool (default: False)
        Begin texts with ``[CLS]`` and end them with ``[SEP]``, as BERT-like models expect.
    """
    identity = f"words of the rows, rule {_RULE}" + (", marked" if marked else "")
    return TokenizerSource(identity, lambda texts: _made_of(texts, marked))


def _made_of(texts: Iterable[str], marked: bool) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(
        vocab_size=LARGEST_VOCABULARY,
        min_frequency=_FEWEST_USES,
        special_tokens=[PAD, UNKNOWN, FIRST, LAST, MASK],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if marked:
        marks = [(mark, tokenizer.token_to_id(mark)) for mark in (FIRST, LAST)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{FIRST} $A {LAST}", special_tokens=marks
        )
    return tokenizer


def prepared_texts(
    texts: TextData,
    tokenizer: TokenizerSource,
    data: str = "",
    *,
    max_tokens: int = 128,
    skip_bad: bool = False,
    max_samples: int = 0,
    again: bool = False,
) -> Prepared:
    """Return the tokens of a data set, preparing them if that was not done yet.

    Its inputs are int32 of shape (N, longest text): token numbers, and -1 behind the end of a
    text. In its folder is also the tokenizer (`TOKENIZER_FILE`), and in its facts is
    ``vocabulary``, how many tokens the tokenizer knows.

    Parameters
    ----------
    texts : TextData
        Which.
    tokenizer : TokenizerSource
        What cuts them.
    data : str (default: "")
        A folder; empty for the Hugging Face hub.
    max_tokens : int (default: 128)
        Longer texts are cut, with the tokenizer's marks within.
    skip_bad : bool (default: False)
        Leave rows out that have no text or no label.
    max_samples : int (default: 0)
        Above 0: use the first so many rows of each split only.
    again : bool (default: False)
        Prepare them even if that was done.

    Raises
    ------
    UsageError
        If there are no such texts, or the cache cannot be written.
    """
    source = find_source(texts.hf_hub_name, data, _LAYOUT, "texts", "text")
    options = {
        "tokenizer": tokenizer.identity,
        "classes": list(texts.class_names),
        "max_tokens": max_tokens,
        "skip_bad": skip_bad,
        "max_samples": max_samples,
    }

    def write(folder: Path, on_items: OnItems) -> Contents:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise source.missing_library(error) from None
        tables = source.tables(folder / SCRATCH)
        splits = [
            _text_split(source, name, source.find_split(tables, name)) for name in ("train", "test")
        ]
        class_names = find_classes(source, texts.name, splits, len(texts.class_names))
        if not any(split.class_names for split in splits):
            class_names = texts.class_names
        train, test = (join_splits([split], max_samples) for split in splits)
        warn_of_unseen_classes(source, train, len(class_names))
        path = folder / TOKENIZER_FILE
        tokenizer.make(_good_texts(train)).save(str(path))
        saved = Tokenizer.from_file(str(path))  # as whoever reads it will have it
        total = len(train) + len(test)
        skipped = {
            split.name: tokenize_split(
                split, folder, saved, max_tokens, skip_bad, lambda number: on_items(number, total)
            )
            for split in (train, test)
        }
        return Contents("tokens", class_names, skipped, {"vocabulary": saved.get_vocab_size()})

    return prepared(Preparation(texts.name, source, options, write), again)


def _text_split(source: DataSource, name: str, table: Any) -> Split:
    from datasets import ClassLabel

    text = find_column(source, name, table, "text", ("text",))
    label = find_column(source, name, table, "label", ("label",), ClassLabel)
    kind = str(getattr(table.features[text], "dtype", table.features[text]))
    if kind not in ("string", "large_string"):
        raise UsageError(
            f"{source.setting}: column {text} of {name} is {kind}, no text; expected {_LAYOUT}"
        )
    return table_split(source, name, table, text, label)


def _good_texts(split: Split) -> Iterator[str]:
    for first in range(0, len(split), _CHUNK):
        texts, wrong = _read_texts(split, first, min(first + _CHUNK, len(split)))
        good = (row not in wrong for row in range(first, first + len(texts)))
        yield from itertools.compress(texts, good)


def _read_texts(split: Split, first: int, last: int) -> tuple[list[str], dict[int, str]]:
    """Return the texts of rows [first, last), and what is wrong with which of these rows.

    The text of a row that has none is empty.
    """
    texts = [text or "" for text in split.stored(first, last)]
    wrong = {}
    for row, text in enumerate(texts, start=first):
        if not text.strip():
            wrong[row] = "has no text"
        elif split.labels[row] == NO_LABEL:
            wrong[row] = "has no label"
    return texts, wrong


def tokenize_split(
    split: Split,
    folder: Path,
    tokenizer: Any,
    max_tokens: int,
    skip_bad: bool,
    on_texts: Callable[[int], None],
) -> int:
    """Write ``<split>_tokens.npy`` and ``<split>_labels.npy``; return how many rows are left out.

    Tokens are int32 of shape (rows, longest text), with `NO_TOKEN` behind each end, and labels
    int64 of shape (rows,).

    Parameters
    ----------
    split : Split
        The texts; their tokens must fit into memory.
    folder : Path
        Where to write.
    tokenizer : tokenizers.Tokenizer
        Its own rules of cutting and padding are overridden; marks that it puts at the end stay.
    max_tokens : int
        Where texts are cut.
    skip_bad : bool
        Leave bad rows out.
    on_texts : callable
        Called with the number of rows after each chunk.

    Raises
    ------
    UsageError
        If a row has no text, no label or no token, and with `skip_bad` if no row is good.
    OSError
        If there is no room for the arrays.
    """
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length=max_tokens)
    marks = tokenizer.num_special_tokens_to_add(is_pair=False)
    kept: list[npt.NDArray[np.int32]] = []
    good = np.ones(len(split), bool)
    for first in range(0, len(split), _CHUNK):
        texts, wrong = _read_texts(split, first, min(first + _CHUNK, len(split)))
        tokens = {row: one.ids for row, one in enumerate(tokenizer.encode_batch(texts), first)}
        for row, ids in tokens.items():
            if len(ids) == marks:
                wrong.setdefault(row, "has no token that could be read")
        if wrong and not skip_bad:
            row = min(wrong)
            raise UsageError(
                f"data: row {row} of {split.name} {wrong[row]}; skip-bad = true leaves such rows "
                "out"
            )
        good[list(wrong)] = False
        kept += [np.array(ids, np.int32) for row, ids in tokens.items() if row not in wrong]
        on_texts(len(texts))
    if not kept:
        raise UsageError(f"data: none of the {len(split)} rows of {split.name} can be used")
    array = np.full((len(kept), max(map(len, kept))), NO_TOKEN, np.int32)
    for row, ids in enumerate(kept):
        array[row, : len(ids)] = ids
    np.save(folder / f"{split.name}_tokens.npy", array)
    np.save(folder / f"{split.name}_labels.npy", split.labels[good])
    return len(split) - len(kept)
