"""What cuts texts into tokens: a vocabulary of the training rows, or a tokenizer that is given."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError

PAD, UNKNOWN, FIRST, LAST, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
LARGEST_VOCABULARY = 30_522
"""As large as BERT's."""

_FEWEST_USES = 2
_RULE = 1
"""Changes when a vocabulary would come out in another way."""


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


def import_tokenizers() -> Any:
    """Return the library.

    Raises
    ------
    UsageError
        If it is not installed.
    """
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "task: cutting texts into tokens needs tokenizers; pip install 'flower-blsgd[text]'"
        ) from None
    return tokenizers


def _made_of(texts: Iterable[str], marked: bool) -> Any:
    library = import_tokenizers()
    from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = library.Tokenizer(models.WordLevel(unk_token=UNKNOWN))
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
