"""Draw a comparison: the metric over time, its final value, and how long the fast devices wait."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ..algorithm.local_steps import Clock
from ..results import plots
from ..results.metric import Metric
from .comparison import Comparison, Run, headline

_LOG_FROM_RATIO = 10
"""Ratio of the longest to the shortest training from which the axis of time is logarithmic."""

_LEAST_SPAN = 0.5
"""Smallest range of an axis in points of accuracy, or in percent of the median of another metric.

A smaller one would enlarge noise.
"""

_CURVES_BELOW_FINALS = 2.5
"""Range of the curves' axis over the range of final values."""

_MOST_BANDS = 4
"""Largest number of algorithms whose bands do not hide the curves."""

_COLORS = [plots.GREEN, plots.BLUE, plots.ORANGE, plots.PURPLE]
_COLORS += [plots.VERMILION, plots.SKY, plots.DARK]
_DASHES = "-", (0, (5, 1.5)), (0, (1, 1))

Style = Mapping[str, Any]


def styles_of(arms: Iterable[str]) -> Mapping[str, Style]:
    """Return the style of each arm; the same arms always have the same styles.

    Seven colours are distinct with any kind of colour vision; further arms get dashes.
    """
    return {
        arm: {"color": _COLORS[i % 7], "marker": "os^DvPX"[i % 7], "linestyle": _DASHES[i // 7 % 3]}
        for i, arm in enumerate(sorted(set(arms)))
    }


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Draw the metric over seconds, its final values and waiting of several algorithms.

    There is a panel with seconds on simulated devices if all runs have them.
    """
    devices = all(run["device_seconds"] is not None for run in comparison.runs)
    rows = len(comparison.algorithms)
    figure = Figure(figsize=(11, 6.2 + 0.28 * rows), layout="constrained")
    number = f"{rows} algorithms: " if rows > 1 else f"{comparison.reference}: "
    figure.suptitle(number + headline(comparison.runs), fontsize=13)
    finals = [value for one in comparison.algorithms for value in one.values]
    metric = comparison.metric
    if not finals:
        plots.save_text_instead(figure, f"no {metric.split} {metric.name} was measured", path)
        return
    shown = final_range(finals, metric)
    styles = styles_of(one.algorithm for one in comparison.algorithms)
    halves: Any = figure.subfigures(2, 1, height_ratios=[4.2, 2 + 0.28 * rows])
    clocks: tuple[Clock, ...] = ("wall", "device") if devices else ("wall",)
    curves = halves[0].subplots(1, len(clocks), squeeze=False, sharey=True)[0]
    ranking, waiting = halves[1].subplots(1, 2, sharey=True, width_ratios=[1.5, 1])
    for axes, clock in zip(curves, clocks, strict=True):
        column, unit = plots.TIME_AXES[clock]
        _draw_curves(axes, comparison, styles, shown, column)
        time = "time on simulated devices" if clock == "device" else "measured time"
        plots.style_panel(axes, f"over {time}", unit, grid=True)
    curves[0].set_ylabel(_label(metric, curves[0].get_ylim()[0]))
    look: Any = {"loc": "outside right upper", "frameon": False, "handlelength": 3.2}
    halves[0].legend(*curves[0].get_legend_handles_labels(), reverse=True, **look)
    _draw_ranking(ranking, comparison, styles, shown)
    plots.style_panel(ranking, f"final {metric.name}", _label(metric, shown[0]), grid=True)
    _draw_waiting(waiting, comparison)
    plots.style_panel(waiting, "fast devices wait", "% of the time")
    band = ", band from the lowest to the highest" if rows <= _MOST_BANDS else ""
    off = "<: left" if metric.sign > 0 else ">: right"
    figure.supxlabel(
        f"curves: mean of the seeds at each epoch{band}\n"
        f"final {metric.name}: dots are seeds, marks their mean ± standard deviation; hollow "
        f"marks: no difference to {comparison.reference} (dotted) is shown; {off} of the axis",
        fontsize=9,
    )
    plots.save(figure, path)


# --- the metric over time


def seed_band(curves: Sequence[Mapping[int, tuple[float, float]]]) -> NDArray[np.float64]:
    """Average the curves of several runs, epoch by epoch.

    A curve maps evaluated epochs to seconds and value; none is empty. Only epochs that all runs
    evaluated count, and the last one of each run, even if their numbers differ. The rows of the
    result are the mean seconds, and the mean, lowest and highest value.
    """
    common = set.intersection(*map(set, curves)) - {max(max(curve) for curve in curves)}
    points = np.array(
        [[curve[at] for at in (*sorted(common), max(curve))] for curve in curves], dtype=np.float64
    )
    seconds, values = points[..., 0], points[..., 1]
    return np.stack([seconds.mean(0), values.mean(0), values.min(0), values.max(0)])


def _draw_curves(
    axes: Axes, its: Comparison, styles: Mapping[str, Style], shown: tuple[float, float], along: str
) -> None:
    """Draw each algorithm's mean, the best on top."""
    seconds, edges = list[float](), [*shown]
    for one in reversed(its.algorithms):
        name, band = one.algorithm, len(styles) <= _MOST_BANDS
        if found := draw_curve(axes, name, one.runs, along, styles[name], band):
            seconds.append(found[0])
            edges += found[1:]
    span = _CURVES_BELOW_FINALS * (shown[1] - shown[0])
    low, high = min(edges), shown[0] + span
    if its.metric.sign > 0:
        low, high = shown[1] - span, max(edges)
    axes.set_ylim(_start_below(low, min(edges), its.metric), high)
    if max(seconds) >= _LOG_FROM_RATIO * min(seconds) > 0:
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, 1.04 * max(seconds))


def draw_curve(
    axes: Axes, arm: str, runs: Sequence[Run], along: str, style: Style, band: bool = True
) -> tuple[float, float, float] | None:
    """Draw an arm's mean and band over a column of ``epochs.csv``.

    Return the end of the curve, its lowest and its highest value; None without an evaluation.
    """
    curves = [
        {
            int(row["epoch"]): (row[along], row["value"])
            for row in run["rows"]
            if None not in (row["value"], row[along])
        }
        for run in runs
    ]
    if not any(curves):
        return None
    at, mean, lowest, highest = seed_band([curve for curve in curves if curve])
    if band:
        axes.fill_between(at, lowest, highest, color=style["color"], alpha=0.12, lw=0)
    axes.plot(at, mean, markevery=[-1], linewidth=1.8, label=arm, **style)
    low, high = (lowest, highest) if band else (mean, mean)
    return float(at[-1]), float(low.min()), float(high.max())


# --- final values and waiting: a row per algorithm, the best on top


def _draw_ranking(
    axes: Axes, comparison: Comparison, styles: Mapping[str, Style], shown: tuple[float, float]
) -> None:
    """Draw a dot per seed, the mean and the standard deviation."""
    axes.set_xlim(*shown)
    beside = axes.get_yaxis_transform()
    for y, one in enumerate(comparison.algorithms):
        style, is_reference = styles[one.algorithm], one.algorithm == comparison.reference
        color = style["color"]
        axes.plot(one.values, [y] * len(one.values), "o", color=color, markersize=4, alpha=0.6)
        axes.text(1.02, y, one.text(comparison.metric), va="center", transform=beside)
        if one.value is None:
            continue
        filled = is_reference or (one.difference is not None and one.difference.shown)
        mark = min(max(one.value, shown[0]), shown[1])
        axes.errorbar(
            mark,
            y,
            xerr=(one.deviation or 0.0) * (mark == one.value),
            fmt=style["marker"] if mark == one.value else "<" if mark > one.value else ">",
            clip_on=False,
            color=color,
            markerfacecolor=color if filled else "white",
            markeredgewidth=1.5,
            markersize=9,
            zorder=3,
        )
        if is_reference:
            axes.axvline(one.value, color=color, linestyle=":", linewidth=1)
    rows = [one.algorithm for one in comparison.algorithms]
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.text(1.02, 1.02, "mean ± sd", color=plots.DARK, transform=axes.transAxes)


def _draw_waiting(axes: Axes, comparison: Comparison) -> None:
    for y, one in enumerate(comparison.algorithms):
        share = one.mean("fast_waiting_share")
        axes.barh(y, 100 * (share or 0), height=0.55, color=plots.GREY)
        text = "not known" if share is None else f"{share:.0%}"
        axes.text(100 * (share or 0) + 3, y, text, va="center")
    axes.set_xlim(0, 130)
    axes.set_xticks([0, 50, 100])
    axes.tick_params(axis="y", left=False)


def final_range(finals: Sequence[float], metric: Metric) -> tuple[float, float]:
    """Return the range of the axis for the final values of all runs.

    Runs far worse than the rest, such as one that diverged, are left out: those more than three
    times the distance of the quartiles from the worse one (Tukey's "far out").
    """
    lower, middle, upper = np.percentile(finals, [25, 50, 75])
    span = _LEAST_SPAN * (1 if metric.is_accuracy else abs(middle) / 100)
    reach = 3 * max(upper - lower, span)
    worse = lower - reach if metric.sign > 0 else upper + reach
    kept = [value for value in finals if metric.sign * value >= metric.sign * worse]
    low, high = min(kept), max(kept)
    margin = max(0.12 * (high - low), span / 2)
    return _start_below(low - margin, low, metric), high + margin


def _start_below(value: float, lowest: float, metric: Metric) -> float:
    """Return the start of an axis: not below 0 for values above 0; a percentage in tenths."""
    start = math.floor(10 * value) / 10 if metric.is_accuracy else value
    return start if lowest < 0 else max(0.0, start)


def _label(metric: Metric, low: float) -> str:
    start = f", axis starts at {low:g}" if low > 0 and metric.is_accuracy else ""
    return metric.label + start
