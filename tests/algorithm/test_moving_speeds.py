import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.moving_speeds import MovingSpeeds, speeds_changed

from .teams import QUICK


def test_average_worked() -> None:
    speeds = MovingSpeeds(0.5)
    speeds.add(0, 1.0)  # the first one counts whole
    assert speeds.seconds_per_step == {0: 1.0}
    speeds.add(0, 2.0)  # 1 + 0.5 x 1
    speeds.add(1, 8.0)
    speeds.add(0, 2.0)  # 1.5 + 0.5 x 0.5
    assert speeds.seconds_per_step == {0: 1.75, 1: 8.0}


def test_five_rounds_hold_92_percent_of_a_change() -> None:
    speeds = MovingSpeeds()
    speeds.add(3, 0.0)
    for _ in range(5):
        speeds.add(3, 1.0)
    assert speeds.seconds_per_step[3] == pytest.approx(1 - 0.6**5)
    assert 0.92 < speeds.seconds_per_step[3] < 0.93


def test_forget_begins_anew() -> None:
    speeds = MovingSpeeds()
    speeds.add(0, 1.0)
    speeds.forget(0)
    speeds.forget(7)
    assert speeds.seconds_per_step == {}
    speeds.add(0, 5.0)
    assert speeds.seconds_per_step == {0: 5.0}


@pytest.mark.parametrize("smoothing", [0.0, -0.1, 1.1, math.nan])
def test_smoothing_out_of_range_refused(smoothing: float) -> None:
    with pytest.raises(ValueError, match="smoothing"):
        MovingSpeeds(smoothing)


@QUICK
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_average_stays_between_the_extremes(values: list[float], smoothing: float) -> None:
    speeds = MovingSpeeds(smoothing)
    for value in values:
        speeds.add(0, value)
    low, high = min(values), max(values)
    assert low * (1 - 1e-9) <= speeds.seconds_per_step[0] <= high * (1 + 1e-9)


@pytest.mark.parametrize(
    ("measured", "changed"),
    [
        ({0: 1.0, 1: 4.0}, False),
        ({0: 2.0, 1: 8.4}, False),  # everybody twice as slow: gamma 0.25 -> 0.238, - 4.8 %
        ({0: 1.0, 1: 4.39}, False),  # gamma - 8.9 %
        ({0: 1.0, 1: 4.45}, True),  # gamma - 10.1 %
        ({0: 1.0, 1: 3.22}, False),  # gamma + 24.2 %
        ({0: 1.0, 1: 3.18}, True),  # gamma + 25.8 %
        ({0: 1.2, 1: 4.0}, False),  # the fast one alone is slower: gamma + 20 %
        ({0: 1.3, 1: 4.0}, True),  # + 30 %
        ({0: 1.0}, True),
        ({0: 1.0, 1: 4.0, 2: 4.0}, True),
    ],
)
def test_dead_band_of_a_tenth_down_and_a_quarter_up(
    measured: dict[int, float], changed: bool
) -> None:
    assert speeds_changed({0: 1.0, 1: 4.0}, measured, 0.1, 0.25) is changed


def test_without_a_dead_band_every_change_counts() -> None:
    assert not speeds_changed({0: 1.0, 1: 4.0}, {0: 2.0, 1: 8.0}, 0.0, 0.0)
    assert speeds_changed({0: 1.0, 1: 4.0}, {0: 1.0, 1: 4.0001}, 0.0, 0.0)


def test_nobody_known_is_no_change() -> None:
    assert not speeds_changed({}, {}, 0.1, 0.25)
