"""Panels with a row per algorithm, the best on top: final accuracy, and how long the fast wait."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from ..results.picture_style import DARK, GREY, plain
from .accuracy_range import accuracy_axis, final_range
from .comparison import AlgorithmFigures, Comparison
from .comparison_words import accuracy_text
from .line_styles import LineStyle

_SAMPLE_LEFT, _SAMPLE_RIGHT = -0.11, -0.02
"""Where the sample of an algorithm's line stands, as shares of the panel's width."""


def draw_ranking(axes: Axes, comparison: Comparison, styles: Mapping[str, LineStyle]) -> None:
    """Draw a dot per seed, the mean and the standard deviation of each algorithm.

    The names with a sample of their lines are the legend of the whole picture.
    """
    rows = comparison.algorithms
    finals = [100 * run.accuracy for run in comparison.runs if run.accuracy is not None]
    low, high = final_range(finals)
    axes.set_xlim(low, high)
    for y, one in enumerate(rows):
        style = styles[one.algorithm]
        axes.plot(
            [_SAMPLE_LEFT, _SAMPLE_RIGHT],
            [y, y],
            color=style.color,
            linestyle=style.line,
            linewidth=2,
            transform=axes.get_yaxis_transform(),
            clip_on=False,
        )
        axes.text(
            1.02,
            y,
            accuracy_text(one),
            va="center",
            fontsize=9,
            transform=axes.get_yaxis_transform(),
        )
        _row(axes, y, one, comparison, style, low)
    _name_rows(axes, comparison)
    axes.set_xlabel(accuracy_axis(low))
    axes.set_title("final accuracy", loc="left", fontsize=10, color=DARK)
    axes.annotate(
        "mean ± sd",
        (1.02, 1),
        (0, 6),
        "axes fraction",
        "offset points",
        fontsize=9,
        color=DARK,
    )
    axes.grid(axis="x", alpha=0.3)
    plain(axes)


def draw_waiting(axes: Axes, comparison: Comparison) -> None:
    """Draw which share of the time the fast devices wait, in the rows of the ranking."""
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
    plain(axes)


def _row(
    axes: Axes,
    y: int,
    one: AlgorithmFigures,
    comparison: Comparison,
    style: LineStyle,
    low: float,
) -> None:
    values = [
        100 * run.accuracy
        for run in comparison.runs
        if run.algorithm == one.algorithm and run.accuracy is not None
    ]
    shown = [value for value in values if value >= low]
    axes.plot(shown, [y] * len(shown), "o", color=style.color, markersize=4, alpha=0.6, zorder=2)
    if one.accuracy is None:
        return
    mean = 100 * one.accuracy
    if len(shown) < len(values):
        lost = ", ".join(f"{value:.1f}" for value in sorted(values) if value < low)
        beside = 0.3 if shown else 0.0  # below the dots of the others
        axes.text(
            0.01,
            y + beside,
            f"\N{LEFTWARDS ARROW} {lost}",
            color=DARK,
            fontsize=8,
            va="center",
            transform=axes.get_yaxis_transform(),
        )
    if mean < low:
        return
    if one.accuracy_deviation is not None:
        spread = 100 * one.accuracy_deviation
        axes.plot([mean - spread, mean + spread], [y, y], color=style.color, lw=1.5, zorder=1)
    is_reference = one.algorithm == comparison.reference
    filled = is_reference or (one.difference is not None and one.difference.shown)
    axes.plot(
        mean,
        y,
        style.marker,
        color=style.color,
        markerfacecolor=style.color if filled else "white",
        markeredgewidth=1.5,
        markersize=9,
        zorder=3,
    )
    if is_reference:
        axes.axvline(mean, color=style.color, linestyle=":", linewidth=1, zorder=0)


def _name_rows(axes: Axes, comparison: Comparison) -> None:
    rows = comparison.algorithms
    axes.set_yticks(range(len(rows)), [one.algorithm for one in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, pad=36)
    for label, one in zip(axes.get_yticklabels(), rows, strict=True):
        if one.algorithm == comparison.reference:
            label.set_fontweight("bold")
