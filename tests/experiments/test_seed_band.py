"""The mean of several seeds' curves."""

import numpy as np

from flower_blsgd.experiments.accuracy_range import accuracy_axis, curve_range, final_range
from flower_blsgd.experiments.seed_band import seed_band


def test_band_is_where_all_curves_are_and_ends_at_the_mean_end() -> None:
    # y = 2x from 0 to 2, y = 4 from 1 to 4: together from 1 to 2; ends (2, 4) and (4, 4).
    band = seed_band([[(0, 0.0), (2, 4.0)], [(1, 4.0), (4, 4.0)]])
    assert band is not None
    np.testing.assert_allclose(band.x, [1, 2, 3])
    np.testing.assert_allclose(band.mean, [3, 4, 4])
    np.testing.assert_allclose(band.low, [2, 4, 4])
    np.testing.assert_allclose(band.high, [4, 4, 4])


def test_one_curve_is_itself() -> None:
    band = seed_band([[(1, 5.0), (2, 7.0), (3, 6.0)], []])
    assert band is not None
    np.testing.assert_allclose(band.x, [1, 2, 3])
    for line in (band.mean, band.low, band.high):
        np.testing.assert_allclose(line, [5, 7, 6])


def test_single_points_and_curves_apart() -> None:
    points = seed_band([[(1, 5.0)], [(3, 7.0)]])
    assert points is not None
    np.testing.assert_allclose(
        (points.x, points.mean, points.low, points.high), [[2], [6], [5], [7]]
    )
    apart = seed_band([[(1, 1.0), (2, 5.0)], [(4, 1.0), (6, 7.0)]])
    assert apart is not None
    np.testing.assert_allclose((apart.x, apart.mean), [[4], [6]])


def test_no_curve() -> None:
    assert seed_band([]) is None
    assert seed_band([[], []]) is None


def test_axis_of_final_accuracies() -> None:
    # 12 % of the span of 2 on both sides: 96.76, of which the start is rounded down.
    assert final_range([97.0, 98.0, 99.0]) == (96.7, 99.24)
    assert final_range([98.0]) == (97.7, 98.25)
    assert final_range([100.0, 99.9])[1] <= 100.2
    assert final_range([0.1, 0.2])[0] == 0


def test_axis_of_curves_is_cut_but_shows_the_ends() -> None:
    low, high = curve_range([97.0, 98.0, 99.0], [20.0, 97.0, 99.0])
    assert high == 99.24
    assert low == 91.3  # 99.24 - 7.924: a tenth of 79.24 is more than 2.5 x 2.54
    assert curve_range([50.0, 90.0], [45.0, 90.0])[0] <= 45
    assert accuracy_axis(low) == "accuracy (%), axis starts at 91.3"
    assert accuracy_axis(0.0) == "accuracy (%)"
