"""The hint at the nearest known words."""

from flower_blsgd.errors import UsageError, nearest


def test_nearest_offers_what_is_close() -> None:
    assert nearest("epoch-s", ["epochs", "seed", "workers"]) == "did you mean epochs?"


def test_nearest_offers_two_at_most() -> None:
    known = ["local-steps-fast", "local-steps-slow", "local-steps-mid"]
    hint = nearest("local-steps-flow", known)
    assert hint.count(" or ") == 1
    assert "local-steps-slow" in hint


def test_nearest_lists_what_is_known_when_nothing_is_close() -> None:
    assert nearest("zzz", ["beta", "alpha"]) == "known: alpha, beta"


def test_usage_error_is_a_value_error() -> None:
    assert issubclass(UsageError, ValueError)
