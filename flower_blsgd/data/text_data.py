"""Labeled texts, tokenized once per machine."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .cache import Prepared
from .source import DataSource
from .splits import Convert, prepared_rows

TOKENIZER_FILE = "tokenizer.json"
"""File name of the tokenizer in a cache entry."""

LARGEST_VOCABULARY = 30_522
"""The size of BERT's vocabulary."""

NUM_CLASSES = 4
AG_NEWS = DataSource(
    name="ag-news",
    hf_hub_name="fancyzhx/ag_news",
    noun="texts",
    forms="{tables}, or .csv, with columns text and label",
    columns=(("text",), ("label",)),
    num_classes=NUM_CLASSES,
)
"""120,000 + 7,600 beginnings of news articles in four classes."""


class TokenizerSource(NamedTuple):
    """Source of a tokenizer, with an identity that is part of the cache key."""

    identity: str
    """Equal only for sources that produce equal tokens for equal training rows."""
    make: Callable[[Iterable[str]], Any]
    """``(training texts) -> tokenizers.Tokenizer``; called only when texts are prepared."""


def vocabulary_of_rows(marked: bool = False) -> TokenizerSource:
    """Return a tokenizer source for the words of the training rows.

    Texts are lowercased without accents. The tokens are the 30,522 most frequent words and
    punctuation marks that occur at least twice, ties in alphabetical order. Unlike the library's
    WordPiece, equal rows give an equal tokenizer on every machine.

    Parameters
    ----------
    marked : bool (default: False)
        Begin texts with ``[CLS]`` and end them with ``[SEP]``, as BERT-like models expect.
    """

    def make(texts: Iterable[str]) -> Any:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

        tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordLevelTrainer(
            vocab_size=LARGEST_VOCABULARY,
            min_frequency=2,
            special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        if marked:
            marks = [(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")]
            tokenizer.post_processor = processors.TemplateProcessing(
                single="[CLS] $A [SEP]", special_tokens=marks
            )
        return tokenizer

    return TokenizerSource("words of the rows" + (", marked" if marked else ""), make)


def prepared_texts(
    tokenizer: TokenizerSource, data: str = "", *, max_tokens: int = 128, **rows: Any
) -> Prepared:
    """Return the tokens of AG News or of custom texts, and prepare them if necessary.

    Inputs are int32 of shape (N, longest text): token ids, padded with -1. Texts are truncated to
    `max_tokens`, including special tokens. The folder also contains the tokenizer
    (`TOKENIZER_FILE`). `data` is a folder, or empty for the HF hub. `rows` are `skip_bad`,
    `max_samples` and `again` of `prepared_rows`, which also documents the errors.
    """

    def converter(rows: Any, folder: Path) -> tuple[Convert, Mapping[str, Any]]:
        from tokenizers import Tokenizer

        path = str(folder / TOKENIZER_FILE)
        texts = (text for text in rows["sample"] if isinstance(text, str))
        tokenizer.make(texts).save(path)
        saved = Tokenizer.from_file(path)  # as readers will load it
        saved.no_padding()
        saved.enable_truncation(max_length=max_tokens)
        marks = saved.num_special_tokens_to_add(is_pair=False)

        def tokens_of(text: str) -> list[int]:
            tokens: list[int] = saved.encode(text).ids
            if len(tokens) == marks:
                raise ValueError("no tokens")
            return tokens

        return tokens_of, {"vocabulary": saved.get_vocab_size()}

    options = {"tokenizer": tokenizer.identity, "max_tokens": max_tokens}
    source = replace(AG_NEWS, data=data)
    return prepared_rows(source, options, converter, (max_tokens,), np.int32, filler=-1, **rows)
