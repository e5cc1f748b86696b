"""Labelled texts, cut into tokens once per machine."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .cache import Prepared, prepared
from .source import find_source
from .splits import read_parts, write_part

TOKENIZER_FILE = "tokenizer.json"
"""In a cache entry: the tokenizer that its tokens come from."""

NO_TOKEN = -1
"""Fills a row behind the end of its text."""

PAD, UNKNOWN, FIRST, LAST, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
LARGEST_VOCABULARY = 30_522
"""As large as BERT's."""

_FEWEST_USES = 2

_LAYOUT = "train-*.parquet and test-*.parquet, or .csv, with columns text and label"


@dataclass(frozen=True)
class TextData:
    """A data set of texts.

    Parameters
    ----------
    name : str
        The task, such as ``"ag-news"``.
    hf_hub_name : str
        What the Hugging Face hub calls it.
    num_classes : int
        How many it must have.
    """

    name: str
    hf_hub_name: str
    num_classes: int


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
    identity = "words of the rows" + (", marked" if marked else "")
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
    text. In its folder is also the tokenizer (`TOKENIZER_FILE`).

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
    source = find_source(texts.hf_hub_name, data, _LAYOUT, "texts")
    options = {
        "tokenizer": tokenizer.identity,
        "classes": texts.num_classes,
        "max_tokens": max_tokens,
        "skip_bad": skip_bad,
        "max_samples": max_samples,
    }

    def write(folder: Path, scratch: Path) -> Mapping[str, Any]:
        source.check_libraries()
        from tokenizers import Tokenizer

        tables = source.tables(scratch)
        parts, num_classes = read_parts(
            source,
            texts.name,
            tables,
            {"train": ("train",), "test": ("test",)},
            (("text",), ("label",)),
            texts.num_classes,
            max_samples,
        )
        path = str(folder / TOKENIZER_FILE)
        rows = (text for text in parts["train"]["sample"] if isinstance(text, str))
        tokenizer.make(rows).save(path)
        saved = Tokenizer.from_file(path)  # as whoever reads it will have it
        saved.no_padding()
        saved.enable_truncation(max_length=max_tokens)
        convert = functools.partial(tokens_of, saved)
        skipped = {
            part: write_part(
                rows, folder, part, convert, (max_tokens,), np.int32, skip_bad, NO_TOKEN
            )
            for part, rows in parts.items()
        }
        vocabulary = saved.get_vocab_size()
        return {"num_classes": num_classes, "skipped": skipped, "vocabulary": vocabulary}

    return prepared(texts.name, source, options, write, again)


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Return the numbers of a text's tokens, with the tokenizer's marks.

    Raises
    ------
    ValueError
        If it has no token but marks.
    """
    tokens: list[int] = tokenizer.encode(text).ids
    if len(tokens) == tokenizer.num_special_tokens_to_add(is_pair=False):
        raise ValueError("it has no token that could be read")
    return tokens
