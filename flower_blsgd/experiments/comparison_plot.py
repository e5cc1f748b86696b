"""Draw a comparison: accuracy over time, the final ranking, and how long the fast devices wait."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ..results.plots import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    draw_text_instead,
    hide_frame,
    save,
)
from .comparison import Comparison, by_algorithm
from .comparison_report import accuracy_text, headline
from .finished_run import FinishedRun

_LOG_FROM_RATIO = 10
"""From this ratio of the longest to the shortest training on, time is drawn logarithmically."""

_LEAST_SPAN = 0.5
"""Points of accuracy that an axis shows at least; less would enlarge noise."""

_CURVES_BELOW_FINALS = 2.5
"""How many times the range of final accuracies the curves' axis shows."""


def _style(color: str, marker: str, dashed: bool = False) -> dict[str, Any]:
    return {"color": color, "marker": marker, "linestyle": (0, (5, 1.5)) if dashed else "-"}


# Dashed: an average after every step. All can be told apart with any kind of colour vision.
STYLES = {
    "biased-local-sgd": _style(GREEN, "o"),
    "unbiased-local-sgd": _style(BLUE, "s"),
    "weighted-local-sgd": _style(ORANGE, "^"),
    "sampled-local-sgd": _style(PURPLE, "D"),
    "balanced-local-sgd": _style(VERMILION, "v"),
    "fast-only-local-sgd": _style(DARK, "P"),
    "fednova": _style(SKY, "X"),
    "sync-sgd": _style(BLUE, "<", dashed=True),
    "sync-sgd-fast-only": _style(DARK, ">", dashed=True),
    "byteps": _style(ORANGE, "p", dashed=True),
    "dlb": _style(VERMILION, "h", dashed=True),
}
"""How each algorithm of the catalog is drawn, the same in every picture."""


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Draw accuracy over seconds, final accuracy and waiting of several algorithms.

    The panel with seconds on simulated devices is left out unless all runs have them.

    Parameters
    ----------
    comparison : Comparison
        The runs and their order.
    path : Path
        A PNG file.
    """
    devices = all(run.device_seconds is not None for run in comparison.runs)
    rows = len(comparison.algorithms)
    size = (16.5 if devices else 13), max(4.8, 2.8 + 0.35 * rows)
    figure = Figure(figsize=size, layout="constrained")
    number = f"{rows} algorithms: " if rows > 1 else f"{comparison.reference}: "
    figure.suptitle(number + headline(comparison.runs))
    finals = _final_percents(comparison.runs)
    if not finals:
        draw_text_instead(figure.subplots(), "no test accuracy was measured")
        save(figure, path)
        return
    shown = final_range(finals)
    ratios = [1.3] * (1 + devices) + [1, 0.45]
    measured, *simulated, ranking, waiting = figure.subplots(1, len(ratios), width_ratios=ratios)
    _draw_curves(measured, comparison, shown, simulated=False)
    for axes in simulated:
        axes.sharey(measured)
        _draw_curves(axes, comparison, shown, simulated=True)
    waiting.sharey(ranking)
    _draw_ranking(ranking, comparison, shown)
    _draw_waiting(waiting, comparison)
    figure.legend(
        handles=[
            Line2D([], [], label=a.algorithm, **STYLES[a.algorithm]) for a in comparison.algorithms
        ],
        loc="outside lower center",
        ncols=6,
        frameon=False,
        handlelength=3,
        title="curves: mean of the seeds at each epoch, band from the lowest to the highest; "
        "dashed: an average after every step\n"
        "final accuracy: small dots are seeds, the large mark their mean, the bar ± standard "
        f"deviation; hollow: no difference to {comparison.reference} (dotted) is shown",
        title_fontproperties={"size": 8.5},
    )
    save(figure, path)


# --- accuracy over time


def seed_band(curves: Sequence[Mapping[int, tuple[float, float]]]) -> NDArray[np.float64]:
    """Average the curves of several runs, epoch by epoch.

    Only epochs that all runs evaluated count, and one point more: the last of each run, even if
    some have more epochs than others. So the band ends at the mean of what was reached at last.

    Parameters
    ----------
    curves : sequence of mappings of int to (float, float)
        By evaluated epoch: seconds and accuracy; at least one, none of them empty.

    Returns
    -------
    array of shape (4, points)
        Mean seconds; mean, lowest and highest accuracy.

    Examples
    --------
    >>> seed_band([{1: (1, 50), 2: (2, 80)}, {1: (3, 60), 2: (6, 84)}]).tolist()
    [[2.0, 4.0], [55.0, 82.0], [50.0, 80.0], [60.0, 84.0]]
    """
    common = set.intersection(*map(set, curves)) - {max(max(curve) for curve in curves)}
    points = np.array(
        [[curve[at] for at in (*sorted(common), max(curve))] for curve in curves], dtype=np.float64
    )
    seconds, accuracy = points[..., 0], points[..., 1]
    return np.stack([seconds.mean(0), accuracy.mean(0), accuracy.min(0), accuracy.max(0)])


def _draw_curves(
    axes: Axes, comparison: Comparison, shown: tuple[float, float], simulated: bool
) -> None:
    bands = {}
    for algorithm, runs in by_algorithm(comparison.runs).items():
        if curves := [curve for curve in (_curve(run, simulated) for run in runs) if curve]:
            bands[algorithm] = seed_band(curves)
    for rank, one in enumerate(comparison.algorithms):
        if one.algorithm not in bands:
            continue
        seconds, mean, lowest, highest = bands[one.algorithm]
        style = STYLES[one.algorithm]
        axes.fill_between(seconds, lowest, highest, color=style["color"], alpha=0.12, linewidth=0)
        on_top = 3 - rank / 100  # the best
        axes.plot(seconds, mean, markevery=[-1], linewidth=1.8, zorder=on_top, **style)
    low, high = shown
    best = max(band[3].max() for band in bands.values())
    low = max(0.0, _round_down(high - _CURVES_BELOW_FINALS * (high - low)))
    axes.set_ylim(low, max(high, best + 0.02 * (best - low)))
    unit = "training time on simulated devices\n(s, computed)" if simulated else "training time (s)"
    ends = [band[0, -1] for band in bands.values()]
    if max(ends) >= _LOG_FROM_RATIO * min(ends) > 0:
        axes.set_xscale("log")
        unit += ", logarithmic"
    else:
        axes.set_xlim(0, 1.04 * max(ends))
    axes.set_xlabel(unit)
    axes.set_ylabel("" if simulated else _accuracy_label(low))
    title = "over time on simulated devices" if simulated else "over measured time"
    axes.set_title(title, loc="left", fontsize=10, color=DARK)
    axes.grid(alpha=0.3)
    hide_frame(axes)


def _curve(run: FinishedRun, simulated: bool) -> dict[int, tuple[float, float]]:
    points = {}
    for row in run.epochs:
        seconds = row.device_seconds if simulated else row.training_seconds
        if seconds is not None and row.accuracy is not None:
            points[row.epoch] = (seconds, 100 * row.accuracy)
    return points


# --- final accuracy and waiting, a row per algorithm, the best on top


def _draw_ranking(axes: Axes, comparison: Comparison, shown: tuple[float, float]) -> None:
    """Draw a dot per seed, the mean and the standard deviation; what is far below is cut."""
    rows, runs = comparison.algorithms, by_algorithm(comparison.runs)
    for y, one in enumerate(rows):
        style, is_reference = STYLES[one.algorithm], one.algorithm == comparison.reference
        finals = _final_percents(runs[one.algorithm])
        axes.plot(finals, [y] * len(finals), "o", color=style["color"], markersize=4, alpha=0.6)
        axes.text(
            1.02,
            y,
            accuracy_text(one),
            va="center",
            fontsize=9,
            transform=axes.get_yaxis_transform(),
        )
        if one.accuracy is None:
            continue
        filled = is_reference or (one.difference is not None and one.difference.shown)
        axes.errorbar(
            100 * one.accuracy,
            y,
            xerr=100 * (one.accuracy_deviation or 0.0),
            fmt=style["marker"],
            color=style["color"],
            markerfacecolor=style["color"] if filled else "white",
            markeredgewidth=1.5,
            markersize=9,
            zorder=3,
        )
        if is_reference:
            axes.axvline(100 * one.accuracy, color=style["color"], linestyle=":", linewidth=1)
    axes.set_xlim(*shown)
    axes.set_yticks(range(len(rows)), [one.algorithm for one in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(_accuracy_label(shown[0]))
    axes.set_title("final accuracy", loc="left", fontsize=10, color=DARK)
    axes.text(1.02, 1.02, "mean ± sd", fontsize=9, color=DARK, transform=axes.transAxes)
    axes.grid(axis="x", alpha=0.3)
    hide_frame(axes)


def _draw_waiting(axes: Axes, comparison: Comparison) -> None:
    for y, one in enumerate(comparison.algorithms):
        share = one.fast_waiting_share
        if share is not None:
            axes.barh(y, 100 * share, height=0.55, color=GREY)
        text = "not known" if share is None else f"{share:.0%}"
        axes.text(100 * (share or 0) + 3, y, text, va="center", fontsize=9)
    axes.set_xlim(0, 130)
    axes.set_xticks([0, 50, 100])
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.set_xlabel("% of the time")
    axes.set_title("fast devices wait", loc="left", fontsize=10, color=DARK)
    hide_frame(axes)


def final_range(finals: Sequence[float]) -> tuple[float, float]:
    """Return the part of the axis that shows final accuracies, in percent.

    All of them, but for those so far below the rest (three times the distance of the quartiles
    below the lower one: Tukey's "far out") that the others would become one point.

    Parameters
    ----------
    finals : sequence of float
        Of every run, at least one.

    Examples
    --------
    A run that diverged does not take the room of those that did not:

    >>> final_range([10.0, 97.0, 98.0, 98.0, 98.0, 99.0, 99.0])
    (96.7, 99.25)
    """
    lower, upper = np.percentile(finals, [25, 75])
    fence = lower - 3 * max(upper - lower, _LEAST_SPAN)
    low, high = min(value for value in finals if value >= fence), max(finals)
    margin = max(0.12 * (high - low), _LEAST_SPAN / 2)
    return max(0.0, _round_down(low - margin)), high + margin


def _final_percents(runs: Sequence[FinishedRun]) -> list[float]:
    return [100 * run.accuracy for run in runs if run.accuracy is not None]


def _accuracy_label(low: float) -> str:
    return "accuracy (%)" + (f", axis starts at {low:g}" if low > 0 else "")


def _round_down(percent: float) -> float:
    """Round an axis' start, which is written out, to a tenth of a point."""
    return math.floor(10 * percent) / 10
