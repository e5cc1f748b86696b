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

from ..results import plots
from .comparison import Comparison, Run
from .comparison_report import accuracy_name, accuracy_text, headline

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
    "recommended": _style(plots.DARK, "*"),
    "biased-local-sgd": _style(plots.GREEN, "o"),
    "unbiased-local-sgd": _style(plots.BLUE, "s"),
    "weighted-local-sgd": _style(plots.ORANGE, "^"),
    "sampled-local-sgd": _style(plots.PURPLE, "D"),
    "balanced-local-sgd": _style(plots.VERMILION, "v"),
    "fast-only-local-sgd": _style(plots.DARK, "P"),
    "fednova": _style(plots.SKY, "X"),
    "biased-local-sgd-released": _style(plots.PURPLE, "*"),
    "unbiased-local-sgd-released": _style(plots.SKY, "d"),
    "sync-sgd": _style(plots.BLUE, "<", dashed=True),
    "sync-sgd-fast-only": _style(plots.DARK, ">", dashed=True),
    "byteps": _style(plots.ORANGE, "p", dashed=True),
    "dlb": _style(plots.VERMILION, "h", dashed=True),
    "biased-local-sgd-200": _style(plots.SKY, "o"),
    "biased-local-sgd-300": _style(plots.PURPLE, "o"),
    "biased-local-sgd-fast-only": _style(plots.PURPLE, "P"),
    "separated-high-to-slow": _style(plots.SKY, "o"),
    "unified-high-to-fast": _style(plots.PURPLE, "X"),
    "unified-high-to-slow": _style(plots.VERMILION, "X"),
}
"""How each algorithm of the catalog is drawn, and the other arms of reproductions."""


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Draw accuracy over seconds, final accuracy and waiting of several algorithms.

    The panel with seconds on simulated devices is left out unless all runs have them.
    """
    devices = all(run["device_seconds"] is not None for run in comparison.runs)
    rows = len(comparison.algorithms)
    size = (16.5 if devices else 13), max(4.8, 2.8 + 0.35 * rows)
    figure = Figure(figsize=size, layout="constrained")
    number = f"{rows} algorithms: " if rows > 1 else f"{comparison.reference}: "
    figure.suptitle(number + headline(comparison.runs))
    finals = [100 * value for one in comparison.algorithms for value in one.accuracies]
    accuracy = accuracy_name(comparison.runs[0])
    if not finals:
        plots.save_text_instead(figure, f"no {accuracy} was measured", path)
        return
    shown = final_range(finals)
    ratios = [1.3] * (1 + devices) + [1, 0.45]
    measured, *simulated, ranking, waiting = figure.subplots(1, len(ratios), width_ratios=ratios)
    _draw_curves(measured, comparison, shown, "training_seconds")
    plots.style_panel(measured, "over measured time", "training time (s)", grid=True)
    measured.set_ylabel(_accuracy_label(accuracy, measured.get_ylim()[0]))
    for axes in simulated:
        axes.sharey(measured)
        _draw_curves(axes, comparison, shown, "device_seconds")
        unit = "training time on simulated devices\n(s, computed)"
        plots.style_panel(axes, "over time on simulated devices", unit, grid=True)
    _draw_ranking(ranking, comparison)
    ranking.set_xlim(*shown)
    plots.style_panel(ranking, "final accuracy", _accuracy_label(accuracy, shown[0]), grid=True)
    waiting.sharey(ranking)
    _draw_waiting(waiting, comparison)
    plots.style_panel(waiting, "fast devices wait", "% of the time")
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
    plots.save(figure, path)


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
    """
    common = set.intersection(*map(set, curves)) - {max(max(curve) for curve in curves)}
    points = np.array(
        [[curve[at] for at in (*sorted(common), max(curve))] for curve in curves], dtype=np.float64
    )
    seconds, accuracy = points[..., 0], points[..., 1]
    return np.stack([seconds.mean(0), accuracy.mean(0), accuracy.min(0), accuracy.max(0)])


def _draw_curves(
    axes: Axes, comparison: Comparison, shown: tuple[float, float], seconds_of: str
) -> None:
    """Draw each algorithm's mean and band; the best on top."""
    arms = reversed(comparison.algorithms)
    found = [draw_curve(axes, one.algorithm, one.runs, seconds_of) for one in arms]
    ends, tops = zip(*(each for each in found if each), strict=True)
    top = max(shown[1], *tops)
    axes.set_ylim(_start_below(shown[1] - _CURVES_BELOW_FINALS * (shown[1] - shown[0])), top)
    if max(ends) >= _LOG_FROM_RATIO * min(ends) > 0:
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, 1.04 * max(ends))


def draw_curve(axes: Axes, arm: str, runs: Sequence[Run], along: str) -> tuple[float, float] | None:
    """Draw an arm's mean and band over a column of ``epochs.csv``.

    Returns where it ends, and its highest accuracy in percent; None if nothing was evaluated.
    """
    curves = [
        {
            int(row["epoch"]): (row[along], 100 * row["accuracy"])
            for row in run["rows"]
            if None not in (row["accuracy"], row[along])
        }
        for run in runs
    ]
    if not any(curves):
        return None
    at, mean, lowest, highest = seed_band([curve for curve in curves if curve])
    style = STYLES.get(arm) or _style(plots.DARK, "o")
    axes.fill_between(at, lowest, highest, color=style["color"], alpha=0.12, lw=0)
    axes.plot(at, mean, markevery=[-1], linewidth=1.8, label=arm, **style)
    return float(at[-1]), float(highest.max())


# --- final accuracy and waiting, a row per algorithm, the best on top


def _draw_ranking(axes: Axes, comparison: Comparison) -> None:
    """Draw a dot per seed, the mean and the standard deviation."""
    beside = axes.get_yaxis_transform()
    for y, one in enumerate(comparison.algorithms):
        style, is_reference = STYLES[one.algorithm], one.algorithm == comparison.reference
        color = style["color"]
        finals = [100 * accuracy for accuracy in one.accuracies]
        axes.plot(finals, [y] * len(finals), "o", color=color, markersize=4, alpha=0.6)
        axes.text(1.02, y, accuracy_text(one), va="center", fontsize=9, transform=beside)
        if one.accuracy is None:
            continue
        filled = is_reference or (one.difference is not None and one.difference.shown)
        axes.errorbar(
            100 * one.accuracy,
            y,
            xerr=100 * (one.accuracy_deviation or 0.0),
            fmt=style["marker"],
            color=color,
            markerfacecolor=color if filled else "white",
            markeredgewidth=1.5,
            markersize=9,
            zorder=3,
        )
        if is_reference:
            axes.axvline(100 * one.accuracy, color=color, linestyle=":", linewidth=1)
    rows = [one.algorithm for one in comparison.algorithms]
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.text(1.02, 1.02, "mean ± sd", fontsize=9, color=plots.DARK, transform=axes.transAxes)


def _draw_waiting(axes: Axes, comparison: Comparison) -> None:
    for y, one in enumerate(comparison.algorithms):
        share = one.mean("fast_waiting_share")
        axes.barh(y, 100 * (share or 0), height=0.55, color=plots.GREY)
        text = "not known" if share is None else f"{share:.0%}"
        axes.text(100 * (share or 0) + 3, y, text, va="center", fontsize=9)
    axes.set_xlim(0, 130)
    axes.set_xticks([0, 50, 100])
    axes.tick_params(axis="y", left=False, labelleft=False)


def final_range(finals: Sequence[float]) -> tuple[float, float]:
    """Return the part of the axis that shows the final accuracies of all runs, in percent.

    But for those so far below the rest (three times the distance of the quartiles below the lower
    one: Tukey's "far out") that the others would become one point, such as a run that diverged.
    """
    lower, upper = np.percentile(finals, [25, 75])
    fence = lower - 3 * max(upper - lower, _LEAST_SPAN)
    low, high = min(value for value in finals if value >= fence), max(finals)
    margin = max(0.12 * (high - low), _LEAST_SPAN / 2)
    return _start_below(low - margin), high + margin


def _start_below(percent: float) -> float:
    """Return where an axis starts: at a tenth of a point, since it is written out, from 0 on."""
    return max(0.0, math.floor(10 * percent) / 10)


def _accuracy_label(name: str, low: float) -> str:
    start = f", axis starts at {low:g}" if low > 0 else ""
    return f"{name.removeprefix('test ')} (%){start}"
