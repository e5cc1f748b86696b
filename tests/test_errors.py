"""The hint at the nearest known words."""

import pytest

from flower_blsgd.errors import nearest


@pytest.mark.parametrize(
    ("word", "known", "hint"),
    [
        ("epoch-s", ["epochs", "seed", "workers"], "did you mean epochs?"),
        ("abc1", ["abc2", "abc3", "abc4"], "did you mean abc4 or abc3?"),  # two at most
        ("zzz", ["beta", "alpha"], "known: alpha, beta"),
        ("betas", ["task", "data"], "known: data, task"),
        ("batch", ["batch-size", "epochs"], "did you mean batch-size?"),
        ("", ["a", "b"], "known: a, b"),
    ],
)
def test_nearest(word: str, known: list[str], hint: str) -> None:
    assert nearest(word, known) == hint
