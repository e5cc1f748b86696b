"""Labelled texts, cut into tokens once per machine."""

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .cache import prepared
from .entry import Prepared
from .preparation import Contents, OnItems, forget_progress, scratch_folder
from .source import DataSource, find_source
from .text_columns import LAYOUT, TextSplit, text_split
from .text_progress import begun_split, record_done, split_key
from .tokenizers import TokenizerSource, import_tokenizers
from .tokenizing import CHUNK, keep_good, tokenize

SPLITS = ("train", "test")
TOKENIZER_FILE = "tokenizer.json"
"""In a folder of the cache: the tokenizer that its tokens come from."""


@dataclass(frozen=True)
class TextData:
    """A data set of texts.

    Parameters
    ----------
    name : str
        The task, such as ``"ag-news"``.
    hub_name : str
        What the hub calls it.
    class_names : tuple of str
        One for each label.
    """

    name: str
    hub_name: str
    class_names: tuple[str, ...]


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
    text. In its folder are also the tokenizer (`TOKENIZER_FILE`) and, as the arrays
    ``train_lengths`` and ``test_lengths``, how many tokens each text had before it was cut.
    Its facts: ``vocabulary``, how many tokens the tokenizer knows; of each split ``texts_cut``
    and ``median_tokens``.

    Parameters
    ----------
    texts : TextData
        Which.
    tokenizer : TokenizerSource
        What cuts them.
    data : str (default: "")
        A folder; empty for the hub.
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
    source = find_source(texts.hub_name, data, LAYOUT, "texts", "text")
    options = {
        "tokenizer": tokenizer.identity,
        "max_tokens": max_tokens,
        "skip_bad": skip_bad,
        "max_samples": max_samples,
    }
    return prepared(_TextPreparation(texts, tokenizer, source, options), again)


@dataclass(frozen=True)
class _TextPreparation:
    texts: TextData
    tokenizer: TokenizerSource
    source: DataSource
    options: Mapping[str, Any]
    noun: str = "texts"

    @property
    def name(self) -> str:
        return self.texts.name

    def write(self, part: Path, on_items: OnItems) -> Contents:
        """See `Preparation.write`."""
        import_tokenizers()
        tables = self.source.tables(scratch_folder(part))
        splits = [self._split(tables, name) for name in SPLITS]
        class_names = self._class_names(splits)
        if not (part / TOKENIZER_FILE).exists():
            forget_progress(part)
        state, skip_bad = self.source.state(), bool(self.options["skip_bad"])
        keys = [split_key(state, split) for split in splits]
        begun = [
            begun_split(part, split, key, self.options["max_tokens"], skip_bad)
            for split, key in zip(splits, keys, strict=True)
        ]
        tokenizer = self._tokenizer(part, splits[0])
        on_items.begin(sum(map(len, splits)), sum(done for _, done in begun))
        for split, key, (raw, first) in zip(splits, keys, begun, strict=True):

            def on_rows(number: int, done: int, name: str = split.name, key: str = key) -> None:
                record_done(part, name, key, done)
                on_items(number)

            tokenize(split, raw, tokenizer, skip_bad, first, on_rows)
        raws = [raw for raw, _ in begun]
        kept = {s.name: keep_good(s, raw, part) for s, raw in zip(splits, raws, strict=True)}
        return Contents(
            inputs="tokens",
            class_names=class_names,
            skipped={name: each.skipped for name, each in kept.items()},
            facts={
                "vocabulary": tokenizer.get_vocab_size(),
                "texts_cut": {name: each.cut for name, each in kept.items()},
                "median_tokens": {name: each.median_tokens for name, each in kept.items()},
            },
        )

    def _split(self, tables: Mapping[str, Any], name: str) -> TextSplit:
        table = self.source.find_split(tables, name)
        return text_split(
            self.source.said, name, table, self.texts.class_names, self.options["max_samples"]
        )

    def _tokenizer(self, part: Path, train: TextSplit) -> Any:
        """Return the tokenizer as it is read from its file, an interrupted call's if there is."""
        path = part / TOKENIZER_FILE
        if not path.exists():
            fresh = path.with_suffix(".new")
            self.tokenizer.make(_texts_of(train)).save(str(fresh))
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
            fresh.replace(path)
        return import_tokenizers().Tokenizer.from_file(str(path))

    def _class_names(self, splits: list[TextSplit]) -> tuple[str, ...]:
        train, test = (split.class_names for split in splits)
        if train and test and train != test:
            raise UsageError(
                f"{self.source.said}: train and test have different classes; both need the same, "
                "in the same order"
            )
        return train or test or self.texts.class_names


def _texts_of(split: TextSplit) -> Iterator[str]:
    """Yield the texts of all good rows."""
    for first in range(0, len(split), CHUNK):
        texts, wrong = split.read(first, min(first + CHUNK, len(split)))
        yield from itertools.compress(texts, (first + k not in wrong for k in range(len(texts))))
