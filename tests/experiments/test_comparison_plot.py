"""The picture of a comparison: its curves, its axes, what it says where figures are missing."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from flower_blsgd.experiments.comparison import Run, compare_runs
from flower_blsgd.experiments.comparison_plot import (
    draw_comparison,
    final_range,
    seed_band,
    styles_of,
)
from flower_blsgd.results.metric import ACCURACY, Metric

from ..results.drawings import texts
from .made_runs import ALGORITHMS, made_run, several

Draw = Callable[[list[Run], str], Figure]


@pytest.fixture
def draw(figures: list[Figure]) -> Draw:
    def figure_of(runs: list[Run], reference: str) -> Figure:
        draw_comparison(compare_runs(runs, reference), Path("nowhere.png"))
        return figures[-1]

    return figure_of


@pytest.mark.parametrize("count", [1, 11])
def test_picture_of_one_and_of_all_algorithms(draw: Draw, count: int) -> None:
    names = ALGORITHMS[:count]
    figure = draw(several(names), names[0])
    curves, ranking, waiting = figure.axes
    assert [label.get_text() for label in ranking.get_yticklabels()] == list(names)
    assert "digits, 3 epochs, 3 seeds" in figure.get_suptitle()
    assert curves.get_xlabel() == "training time (s)"
    for axes, label in ((curves, curves.get_ylabel()), (ranking, ranking.get_xlabel())):
        low = axes.get_ylim()[0] if axes is curves else axes.get_xlim()[0]
        assert label == f"accuracy (%), axis starts at {low:g}"
    assert len(waiting.patches) == count
    bottom, top = ranking.get_ylim()
    assert top < 0 < bottom  # the best on top
    assert len(curves.collections) == (count <= 4)  # bands


def test_algorithms_that_are_new_in_the_catalog_are_drawn_apart(draw: Draw) -> None:
    names = ["my-own-sgd", *ALGORITHMS, "another"]
    styles = styles_of(names)
    assert len({tuple(style.values()) for style in styles.values()}) == len(names)
    figure = draw(several(names[:6]), names[0])
    (legend,) = figure.subfigs[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        one.get_text() for one in figure.axes[1].get_yticklabels()
    ]
    of_panels = [{line.get_label(): line.get_color() for line in figure.axes[0].lines}]
    assert of_panels[0] == {name: styles_of(names[:6])[name]["color"] for name in names[:6]}


def test_picture_of_a_metric_whose_smaller_values_are_better(draw: Draw) -> None:
    named = {"metric_name": "rmse", "metric_mode": "min"}
    runs = [
        made_run(name, seed, (9.0, 0.25, last + 0.01 * seed), **named)
        for name, last in (("a", 0.4), ("b", 0.3), ("c", 0.35))
        for seed in range(2)
    ]
    figure = draw([*runs, made_run("d", 0, (9.0, 8.0), **named)], "a")
    curves, ranking, _ = figure.axes
    assert [text.get_text() for text in ranking.get_yticklabels()] == ["b", "c", "a", "d"]
    # Finals from 0.3 to 0.41, with 12 % of 0.11 on both sides; the curves start at their lowest,
    # and end 2.5 x 0.1364 above the finals' axis.
    assert ranking.get_xlim() == pytest.approx((0.2868, 0.4232))
    assert curves.get_ylim() == pytest.approx((0.25, 0.2868 + 2.5 * 0.1364))
    assert curves.get_ylabel() == ranking.get_xlabel() == "rmse (lower is better)"
    assert {"final rmse", "0.3050 ± 0.0071", "8.0000"} <= texts(figure)
    marks = [line.get_xdata()[0] for line in ranking.lines if line.get_marker() == ">"]
    assert marks == [ranking.get_xlim()[1]]
    (dotted,) = [line for line in ranking.lines if line.get_linestyle() == ":"]
    np.testing.assert_allclose(dotted.get_xdata(), 0.405)


def test_panel_of_simulated_devices_only_if_all_are_known(draw: Draw) -> None:
    known = [made_run(name, 0, (0.5, 0.9), 2.0, 0.5) for name in ("dlb", "byteps")]
    figure = draw(known, "dlb")
    assert len(figure.axes) == 4
    assert "simulated devices (s, computed)" in figure.axes[1].get_xlabel()
    np.testing.assert_allclose(figure.axes[1].lines[0].get_xydata(), [(0.5, 50), (1, 90)])
    figure = draw([*known, made_run("fednova", 0)], "dlb")
    assert len(figure.axes) == 3


def test_time_is_logarithmic_where_one_takes_far_longer(draw: Draw) -> None:
    runs = [made_run("dlb", 0, seconds_per_epoch=1.0), made_run("byteps", 0, seconds_per_epoch=50)]
    assert draw(runs, "dlb").axes[0].get_xscale() == "log"
    assert draw(runs[:1], "dlb").axes[0].get_xscale() == "linear"


def test_missing_evaluations(draw: Draw) -> None:
    never = made_run("dlb", 0, (None, None), fast_waiting_share=None)
    figure = draw([never, made_run("byteps", 0)], "byteps")
    assert {"not measured", "not known"} <= texts(figure)
    assert "no test accuracy was measured" in texts(draw([never], "dlb"))


@pytest.mark.parametrize(
    ("curves", "x", "mean", "low", "high"),
    [
        # common epochs 1 and 2; the ends are those of epochs 2 and 3
        (
            [{1: (1, 10), 2: (2, 40)}, {1: (3, 20), 2: (4, 60), 3: (6, 70)}],
            *([2, 3, 4], [15, 50, 55], [10, 40, 40], [20, 60, 70]),
        ),
        ([{1: (1, 5), 2: (2, 7), 3: (3, 6)}], [1, 2, 3], [5, 7, 6], [5, 7, 6], [5, 7, 6]),
        ([{1: (1, 5)}, {3: (3, 7)}], [2], [6], [5], [7]),  # nothing in common but the ends
    ],
)
def test_band_is_the_mean_at_each_common_epoch_and_at_the_ends(
    curves: list[dict[int, tuple[float, float]]],
    x: list[float],
    mean: list[float],
    low: list[float],
    high: list[float],
) -> None:
    np.testing.assert_allclose(seed_band(curves), [x, mean, low, high])


def test_axis_of_final_accuracies() -> None:
    accuracy = ACCURACY
    # 12 % of the span of 2 below: 96.76, rounded down; 0.25 above
    assert final_range([97.0, 98.0, 99.0], accuracy) == (96.7, 99.25)
    assert final_range([98.0], accuracy) == (97.7, 98.25)
    assert final_range([0.1, 0.2], accuracy)[0] == 0
    diverged = [10.0, 97.0, 98.0, 98.0, 98.0, 99.0]
    assert final_range(diverged, accuracy)[0] == 96.7  # no room for it


def test_axis_of_another_metric() -> None:
    # 12 % of the span of 2 on both sides
    rmse, score = Metric("rmse", "min"), Metric("score", "max")
    assert final_range([2.0, 3.0, 4.0], rmse) == pytest.approx((1.76, 4.24))
    assert final_range([0.01, 0.02, 0.11], rmse) == pytest.approx((0.0, 0.122))  # not below 0
    assert final_range([-4.0, -3.0, -2.0], score) == pytest.approx((-4.24, -1.76))
    assert final_range([200.0], rmse) == pytest.approx((199.5, 200.5))  # 0.5 % of 200
    # Quartiles 3 and 3: further than 3 x 0.5 % of 3 on the worse side is left out.
    finals = [2.0, 3.0, 3.0, 3.0, 3.0, 90.0]
    assert final_range(finals, rmse) == pytest.approx((1.88, 3.12))
    assert final_range(finals, score) == pytest.approx((0.0, 100.44))  # 3 - 0.12 x 87 is below 0
