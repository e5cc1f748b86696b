"""The picture of a run's accuracy."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from flower_blsgd.results.learning_curve import draw_learning_curve

from .drawings import pixels_of, texts
from .records import epoch

LINE = "#009E73"


def test_learning_curve(tmp_path: Path, figures: list[Figure]) -> None:
    rows = [epoch(n, accuracy=a) for n, a in ((1, 0.5), (2, None), (3, 0.9), (4, 0.8))]
    path = tmp_path / "learning_curve.png"
    draw_learning_curve(rows, "biased-local-sgd, digits", path)
    assert pixels_of(path, LINE) > 200

    (figure,) = figures
    left, right = figure.axes
    # An epoch that was not evaluated is left out, on both axes.
    np.testing.assert_allclose(left.lines[0].get_xydata(), [(1, 50), (3, 90), (4, 80)])
    np.testing.assert_allclose(right.lines[0].get_xydata(), [(2, 50), (6, 90), (8, 80)])
    assert (left.get_xlabel(), left.get_ylabel()) == ("epoch", "test accuracy (%)")
    assert right.get_xlabel() == "training time (s)"
    assert figure.get_suptitle() == "biased-local-sgd, digits"
    assert {"best 90.0 % in epoch 3 (circle)", "best 90.0 % after 6 s (circle)"} <= texts(figure)
    for axes, where in ((left, 3), (right, 6)):
        assert axes.lines[1].get_ydata()[0] == pytest.approx(90)
        np.testing.assert_allclose(axes.lines[2].get_xydata(), [(where, 90)])
        assert axes.get_xlim()[0] == 0


@pytest.mark.parametrize("rows", [[], [epoch(1, accuracy=None)]], ids=["no epoch", "not measured"])
def test_learning_curve_without_accuracy_says_so(
    tmp_path: Path, figures: list[Figure], rows: list[object]
) -> None:
    path = tmp_path / "learning_curve.png"
    draw_learning_curve(rows, "stopped early", path)  # type: ignore[arg-type]
    assert pixels_of(path, LINE) == 0
    assert "no test accuracy was measured" in texts(figures[0])
    assert not any(text.startswith("best") for text in texts(figures[0]))


@pytest.mark.parametrize("epochs", [1, 2, 300])
def test_learning_curve_of_few_and_many_epochs(
    tmp_path: Path, figures: list[Figure], epochs: int
) -> None:
    path = tmp_path / "learning_curve.png"
    draw_learning_curve([epoch(n + 1, accuracy=n / 400) for n in range(epochs)], "x", path)
    assert pixels_of(path, LINE) > 10
    ticks = figures[0].axes[0].get_xticks()
    assert all(float(tick).is_integer() for tick in ticks)
    # Points of a long run would run into one another.
    size = figures[0].axes[0].lines[0].get_markersize()
    assert size < 2 if epochs == 300 else size >= 4


def test_learning_curve_on_the_device_clock(tmp_path: Path, figures: list[Figure]) -> None:
    rows = [epoch(n, device_seconds=n / 2) for n in (1, 2)]
    draw_learning_curve(rows, "x", tmp_path / "learning_curve.png", "device")
    right = figures[0].axes[1]
    np.testing.assert_allclose(right.lines[0].get_xdata(), [0.5, 1.0])
    assert right.get_xlabel() == "training time on simulated devices (s, computed)"


def test_learning_curve_on_an_unknown_device_clock_is_measured(
    tmp_path: Path, figures: list[Figure]
) -> None:
    rows = [epoch(1, device_seconds=0.5), epoch(2)]
    draw_learning_curve(rows, "x", tmp_path / "learning_curve.png", "device")
    right = figures[0].axes[1]
    np.testing.assert_allclose(right.lines[0].get_xdata(), [2.0, 4.0])
    assert right.get_xlabel() == "training time (s)"
