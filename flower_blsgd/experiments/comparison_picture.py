"""The picture of a comparison: accuracy over time, the final order, who waits."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..results.picture_style import DARK, plain, save, say_instead
from .accuracy_range import accuracy_axis, curve_range
from .comparison import Comparison
from .conditions import headline
from .end_labels import label_ends
from .finished_run import FinishedRun
from .line_styles import DASHED, LineStyle, styles_of
from .ranking_panel import draw_ranking, draw_waiting
from .seed_band import SeedBand, seed_band

_MEASURED = "training time (s)"
_SIMULATED = "training time on simulated devices\n(s, computed)"
_LONG_AGAINST_SHORT = 10
"""From this ratio of the longest to the shortest training on, time is drawn logarithmically."""


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
    clocks = [False, True] if devices else [False]
    rows = len(comparison.algorithms)
    width, height = (16.5 if devices else 13), max(4.2, 2.2 + 0.33 * rows)
    figure = Figure(figsize=(width, height), layout="constrained")
    number = f"{rows} algorithms: " if rows > 1 else f"{comparison.reference}: "
    figure.suptitle(number + headline(comparison.runs))
    if all(run.accuracy is None for run in comparison.runs):
        say_instead(figure.subplots(), "no test accuracy was measured")
        save(figure, path)
        return
    ratios = [1.3] * len(clocks) + [1, 0.45]
    *curves, ranking, waiting = figure.subplots(1, len(ratios), width_ratios=ratios)
    waiting.sharey(ranking)
    if devices:
        curves[1].sharey(curves[0])
    styles = styles_of([one.algorithm for one in comparison.algorithms])
    draw_ranking(ranking, comparison, styles)
    draw_waiting(waiting, comparison)
    figure.supxlabel(_how_to_read(comparison), fontsize=8.5, color=DARK)
    drawn = [
        _draw_curves(axes, comparison, styles, simulated)
        for axes, simulated in zip(curves, clocks, strict=True)
    ]
    for axes, lines in zip(curves, drawn, strict=True):
        label_ends(axes, lines)
    save(figure, path)


def _draw_curves(
    axes: Axes, comparison: Comparison, styles: Mapping[str, LineStyle], simulated: bool
) -> dict[str, Line2D]:
    bands: dict[str, SeedBand] = {}
    for one in comparison.algorithms:
        runs = [run for run in comparison.runs if run.algorithm == one.algorithm]
        band = seed_band([_curve(run, simulated) for run in runs])
        if band is not None:
            bands[one.algorithm] = band
    lines = {}
    for place, (name, band) in enumerate(bands.items()):
        style = styles[name]
        front = 3 + (len(bands) - place) / 100  # the best on top
        axes.fill_between(
            band.x, band.low, band.high, color=style.color, alpha=0.12, linewidth=0, zorder=1
        )
        (lines[name],) = axes.plot(
            band.x, band.mean, color=style.color, linestyle=style.line, linewidth=1.8, zorder=front
        )
        axes.plot(
            band.x[-1], band.mean[-1], style.marker, color=style.color, markersize=7, zorder=front
        )
    finals = [100 * run.accuracy for run in comparison.runs if run.accuracy is not None]
    low, high = curve_range(finals, [y for band in bands.values() for y in (*band.low, *band.high)])
    axes.set_ylim(low, high)
    unit = _SIMULATED if simulated else _MEASURED
    ends = [band.x[-1] for band in bands.values()]
    if max(ends) >= _LONG_AGAINST_SHORT * min(ends) > 0:
        axes.set_xscale("log")
        unit += ", logarithmic"
    else:
        axes.set_xlim(0, 1.04 * max(ends))
    axes.set_xlabel(unit)
    axes.set_ylabel("" if simulated else accuracy_axis(low))
    title = "over time on simulated devices" if simulated else "over measured time"
    axes.set_title(title, loc="left", fontsize=10, color=DARK)
    axes.grid(alpha=0.3)
    plain(axes)
    return lines


def _curve(run: FinishedRun, simulated: bool) -> list[tuple[float, float]]:
    points = []
    for row in run.epochs:
        seconds = row.device_seconds if simulated else row.training_seconds
        if seconds is not None and row.accuracy is not None:
            points.append((seconds, 100 * row.accuracy))
    return points


def _how_to_read(comparison: Comparison) -> str:
    parts = ["left: mean of the seeds and band from the lowest to the highest"]
    parts += [
        "right: small dots are seeds, the large mark their mean, the bar ± standard deviation"
    ]
    text = "; ".join(parts)
    if len(comparison.algorithms) > 1:
        text += f"\nhollow: no difference to {comparison.reference} (dotted) is shown"
        names = [one.algorithm for one in comparison.algorithms]
        if any(style.line == DASHED for style in styles_of(names).values()):
            text += "; dashed lines: an average after every step"
    return text
