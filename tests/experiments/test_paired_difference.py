"""How far two algorithms lie apart, by hand."""

import math

import pytest

from flower_blsgd.experiments.paired_difference import paired_difference, t_quantile


def test_two_pairs() -> None:
    # Mean 2, standard deviation sqrt(2), so the half width is 12.706 x sqrt(2) / sqrt(2).
    found = paired_difference([1.0, 3.0])
    assert found is not None
    assert (found.mean, found.pairs) == (2.0, 2)
    assert found.interval == pytest.approx((2 - 12.706, 2 + 12.706))
    assert not found.shown
    assert found.in_words == "no difference shown"


@pytest.mark.parametrize(("sign", "words"), [(1, "better"), (-1, "worse")])
def test_difference_that_is_shown(sign: int, words: str) -> None:
    # Mean 4, deviation 1, three pairs: 4 -+ 4.303 / sqrt(3) = 4 -+ 2.484.
    found = paired_difference([sign * 3.0, sign * 4.0, sign * 5.0])
    assert found is not None
    assert found.interval == pytest.approx((sign * 4 - 2.4843, sign * 4 + 2.4843), abs=1e-4)
    assert found.shown
    assert found.in_words == words


def test_one_pair_has_no_interval() -> None:
    found = paired_difference([0.5])
    assert found is not None
    assert (found.mean, found.interval, found.shown) == (0.5, None, False)
    assert "one pair" in found.in_words


@pytest.mark.parametrize("difference", [0.0, 0.25])
def test_equal_pairs_cannot_tell_their_spread(difference: float) -> None:
    found = paired_difference([difference, difference + 1e-16, difference])
    assert found is not None
    assert found.interval is None
    assert found.in_words == "no difference shown"


def test_no_pair() -> None:
    assert paired_difference([]) is None


def test_quantiles_fall_towards_the_normal_one() -> None:
    assert [t_quantile(n) for n in (1, 2, 10, 30)] == [12.706, 4.303, 2.228, 2.042]
    assert (t_quantile(31), t_quantile(1000)) == (1.96, 1.96)
    every = [t_quantile(n) for n in range(1, 32)]
    assert every == sorted(every, reverse=True)


def test_quantiles_are_those_of_students_distribution() -> None:
    """The density's integral up to the first ones is 0.975; by hand for 1 and 2 degrees."""
    assert 0.5 + math.atan(t_quantile(1)) / math.pi == pytest.approx(0.975, abs=1e-5)
    t = t_quantile(2)
    assert 0.5 + t / (2 * math.sqrt(2 + t * t)) == pytest.approx(0.975, abs=1e-5)
