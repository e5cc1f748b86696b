"""A vocabulary of the training rows: which words it knows, and that it is the same everywhere."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from flower_blsgd.data.tokenizers import vocabulary_of_rows

pytest.importorskip("tokenizers")

TEXTS = ["The Café, the bar.", "a bar; the bar!", "Zebra cafe, apple apple"]


def made_of(texts: Sequence[str], marked: bool = False) -> Any:
    return vocabulary_of_rows(marked).make(texts)


def test_words_that_occur_twice_by_frequency_then_alphabet() -> None:
    tokenizer = made_of(TEXTS)
    words = [tokenizer.id_to_token(k) for k in range(tokenizer.get_vocab_size())]
    assert words[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # bar and the three times; a, zebra and . ; ! once
    assert words[5:] == ["bar", "the", ",", "apple", "cafe"]


def test_case_accents_and_unknown_words() -> None:
    encoded = made_of(TEXTS).encode("THE CAFÉ, zebra")
    assert encoded.tokens == ["the", "cafe", ",", "[UNK]"]


def test_marks() -> None:
    encoded = made_of(TEXTS, marked=True).encode("the bar")
    assert encoded.tokens == ["[CLS]", "the", "bar", "[SEP]"]
    assert encoded.ids[0] == 2
    assert encoded.ids[-1] == 3


def test_identity_tells_the_two_apart() -> None:
    plain, marked = vocabulary_of_rows(), vocabulary_of_rows(marked=True)
    assert plain.identity != marked.identity
    assert plain.identity == vocabulary_of_rows().identity


@pytest.mark.processes
def test_equal_in_every_process() -> None:
    """Nodes prepare their own data, and must agree: no hash seed may show."""
    code = (
        "from flower_blsgd.data.tokenizers import vocabulary_of_rows\n"
        "texts = [' '.join(f'w{k * j % 977}' for k in range(40)) for j in range(300)]\n"
        "print(vocabulary_of_rows(True).make(texts).to_str())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(3)
    }
    assert len(told) == 1
    assert len(told.pop()) > 10_000
