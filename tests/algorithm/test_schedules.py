import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flower_blsgd.algorithm.schedules import LearningRate, parse_decay


@pytest.mark.parametrize(
    ("epoch", "expected"),
    # MultiStepLR with milestones 60 and 80: epochs 1 to 60 at the base, 61 to 80 at a tenth
    [(1, 0.1), (60, 0.1), (61, 0.01), (80, 0.01), (81, 0.001), (100, 0.001), (500, 0.001)],
)
def test_plain_epochs_worked(epoch: int, expected: float) -> None:
    rate = LearningRate(0.1, decay_epochs=(60, 80))
    assert rate.at(epoch, (epoch - 1) / 100) == pytest.approx(expected)


@given(st.integers(1, 99), st.integers(1, 300), st.integers(1, 500))
@example(2, 115, 10)  # (2 + 3 / 10) / 115 is below 0.02 in floating point
def test_share_of_any_number_of_epochs_is_exact(percent: int, epochs: int, rounds: int) -> None:
    """P % of E epochs decays in the first round at or past P E / 100 epochs, in exact numbers."""
    rate = LearningRate(1.0, decay_shares=parse_decay(f"{percent}%")[1])
    first = -(-percent * epochs * rounds // 100)  # rounds of all epochs before it
    for done, expected in ((first, 0.1), (first - 1, 1.0)):
        epoch, in_epoch = done // rounds + 1, done % rounds
        share = (epoch - 1 + in_epoch / rounds) / epochs  # as the planner computes it
        assert rate.at(epoch, share, in_epoch, rounds) == pytest.approx(expected)


def test_factor_and_several_decays_at_once() -> None:
    rate = LearningRate(8.0, decay_epochs=(3, 1), decay_shares=(0.5,), factor=0.5)
    # order does not matter: after 3 epochs and half the budget, 8 / 2 / 2 / 2
    assert rate.at(4, 0.5) == pytest.approx(1.0)


def test_warmup_grows_round_by_round_and_multiplies_with_decay() -> None:
    # 2 epochs of 4 rounds: 1/8, 2/8, ..., 8/8 of the base, then the base
    rate = LearningRate(0.8, warmup_epochs=2)
    rates = [rate.at(e, 0.0, r, 4) for e in (1, 2, 3) for r in range(4)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8] + [0.8] * 4)
    assert LearningRate(0.8).at(1, 0.0, 0, 100) == 0.8  # none by default
    # after 1 epoch: 0.1; half of the warm-up of 4 epochs: 0.5
    assert LearningRate(1.0, (1,), warmup_epochs=4).at(2, 0.0) == pytest.approx(0.05)


def test_cosine_and_linear_worked() -> None:
    """At 0, 1/4, 1/2, 3/4 of the budget, and at its end; decays have no effect."""
    shares = [0.0, 0.25, 0.5, 0.75, 1.0]
    decays: dict[str, Any] = {"decay_epochs": (1,), "decay_shares": (0.2,)}
    linear = LearningRate(0.8, schedule="linear", **decays)
    assert [linear.at(9, share) for share in shares] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    # 0.4 (1 + cos(pi / 4)) = 0.4 x 1.70711
    cosine = LearningRate(0.8, schedule="cosine", **decays)
    expected = [0.8, 0.682843, 0.4, 0.117157, 0.0]
    assert [cosine.at(9, share) for share in shares] == pytest.approx(expected, abs=1e-6)
    assert linear.at(9, 1.5) == cosine.at(9, 1.5) == 0.0


def test_cosine_and_linear_begin_where_the_warmup_ends() -> None:
    """10 epochs of 2 rounds, 2 of warm-up: 8 are left, so epoch 5.0 is 3/8 of the way down."""
    rate = LearningRate(0.8, warmup_epochs=2, schedule="linear")
    rates = [rate.at(e, (e - 1 + r / 2) / 10, r, 2) for e in range(1, 11) for r in (0, 1)]
    line = [0.8 * (16 - i) / 16 for i in range(16)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, *line])
    # A budget of 50 s, of which an epoch takes 4 s: warm until 8 s, and 20 s are 12/42 further.
    assert rate.at(6, 20 / 50) == pytest.approx(0.8 * (1 - 12 / 42))
    cosine = LearningRate(0.8, warmup_epochs=2, schedule="cosine")
    assert cosine.at(7, 0.6) == pytest.approx(0.4)
    assert cosine.at(3, 0.2) == 0.8
    assert cosine.at(3, 1.0) == cosine.at(11, 1.0) == 0.0


@pytest.mark.parametrize("base", [0.0, -0.1, math.nan, math.inf])
def test_impossible_base_or_schedule_refused(base: float) -> None:
    with pytest.raises(ValueError, match="learning rate"):
        LearningRate(base)
    with pytest.raises(ValueError, match="schedule = 'cosines' must be one of steps, cosine"):
        LearningRate(0.1, schedule="cosines")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("60%, 80%", ((), (0.6, 0.8))),
        ("60, 80", ((60.0, 80.0), ())),
        ("30,80%", ((30.0,), (0.8,))),
        ("12.5%", ((), (0.125,))),
        ("100", ((100.0,), ())),
        ("", ((), ())),
        ("  ", ((), ())),
    ],
)
def test_parse_decay_worked(text: str, expected: object) -> None:
    assert parse_decay(text) == expected


@pytest.mark.parametrize(
    "text", ["100%", "150%", "0", "0%", "-5", "-5%", "x", "%", "nan", "inf", "nan%", "60%%", "1;2"]
)
def test_parse_decay_refused_by_the_wrong_entry(text: str) -> None:
    with pytest.raises(ValueError, match=rf"'{text}'.*(epochs|above 0|below 100)"):
        parse_decay(f"80%, {text}")
