"""Draw the paper's figures: learning curves, features, time per round, and schedule.

Each function takes the runs of each arm, one for each seed, and writes a PNG file.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..experiments.comparison import Run, metric_of
from ..experiments.comparison_plot import draw_curve, final_range, styles_of
from ..results import plots
from ..results.round_totals import metrics_of
from ..strategy.round_metrics import RoundRecord

Runs = Mapping[str, Sequence[Run]]


def draw_learning_curves(runs: Runs, path: Path) -> None:
    """Draw accuracy over epochs and over seconds: the mean of the seeds, and a band of all seeds.

    On the clock "device" these are seconds on simulated devices.
    """
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    column, unit = _clock(runs)
    for axes, along, text in zip(panels, ("epoch", column), ("epoch", unit), strict=True):
        for arm, its in runs.items():
            draw_curve(axes, arm, its, along, styles_of(runs)[arm])
        plots.style_panel(axes, "mean; from the lowest to the highest seed", text, grid=True)
        axes.set_xlim(left=0)
    panels[0].set_ylabel(f"{metric_of(_first(runs)).split} accuracy (%)")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    plots.save(figure, path)


def draw_features(runs: Runs, path: Path) -> None:
    """Draw final accuracy as a bar per arm, with its standard deviation; a dot is a seed."""
    figure = Figure(figsize=(2.5 + 1.4 * len(runs), 4.6), layout="constrained")
    axes, metric = figure.subplots(), metric_of(_first(runs))
    finals = {k: [r["value"] for r in its if r["value"] is not None] for k, its in runs.items()}
    low, high = final_range([x for its in finals.values() for x in its] or [0.0], metric)
    for x, (arm, its) in enumerate(finals.items()):
        if its:
            mean, deviation = fmean(its), stdev(its) if len(its) > 1 else 0.0
            look: dict[str, Any] = {
                "color": styles_of(runs)[arm]["color"],
                "alpha": 0.7,
                "width": 0.6,
            }
            axes.bar(x, max(0.0, mean - low), bottom=low, yerr=deviation, capsize=6, **look)
            axes.plot([x] * len(its), its, "o", color="black", markersize=4, alpha=0.5)
            top = max(*its, mean + deviation) + 0.02 * (high - low)
            axes.text(x, top, f"{mean:.2f}", ha="center", va="bottom")
    axes.set_xticks(range(len(finals)), [arm.removesuffix("-local-sgd") for arm in finals])
    axes.set_ylim(low, high + 0.1 * (high - low))
    plots.style_panel(axes, "mean ± standard deviation; dots: seeds", "")
    axes.set_ylabel(f"final {metric.split} accuracy (%), axis starts at {low:g}")
    plots.save(figure, path)


def draw_timing(runs: Runs, path: Path) -> None:
    """Draw how long each device computes, waits and communicates in a round, a panel per arm.

    Bars are means over rounds and seeds; the line on a bar is the standard deviation of computing.
    """
    times = {label: [_seconds_per_round(run) for run in its] for label, its in runs.items()}
    figure, panels = _panels([len(its[0]) for its in times.values()])
    for axes, (label, its) in zip(panels, times.items(), strict=True):
        for y, device in enumerate(its[0]):
            seeds = np.array([found[device] for found in its if device in found])
            compute, wait, whole = seeds.mean(axis=0)
            deviation = seeds[:, 0].std(ddof=1) if len(seeds) > 1 else 0.0
            axes.barh(y, whole, color=plots.MOVE)
            axes.barh(y, wait, left=compute, color=plots.WAIT)
            axes.barh(y, compute, color=plots.COMPUTE, xerr=deviation or None, capsize=3)
        axes.set_yticks(range(len(its[0])), list(its[0]))
        axes.invert_yaxis()
        plots.style_panel(axes, label, _clock(runs)[1].replace("training time", "time per round"))
    plots.time_legend(figure)
    plots.save(figure, path)


def draw_schedule(runs: Runs, path: Path) -> None:
    """Draw when each worker computes, from the second round, with the first seed of each arm.

    All arms share the axis of time, which shows two rounds of the arm with the longest rounds and
    at most 100 rounds of the others. Arms whose times are unknown are left out.
    """
    rounds = {label: found for label, its in runs.items() if (found := _rounds(its[0]))}
    if not rounds:
        plots.save_text_instead(Figure(), "the times of the rounds are unknown", path)
        return
    window = 2 * max(fmean(record.round_seconds for record in its) for its in rounds.values())
    figure, panels = _panels([len(its[0].workers) for its in rounds.values()])
    for axes, (label, its) in zip(panels, rounds.items(), strict=True):
        ends = np.cumsum([record.round_seconds for record in its])
        shown = its[: min(int(np.searchsorted(ends, window)) + 1, 100)]
        labels = {row.worker: row.label for record in shown for row in record.workers}
        y_of = {worker: y for y, worker in enumerate(sorted(labels, reverse=True))}
        plots.draw_rounds(axes, shown, y_of)
        axes.set_yticks(list(y_of.values()), [labels[worker] for worker in y_of])
        axes.set_xlim(0, window)
        unit = _clock(runs)[1].replace("training ", "")
        plots.style_panel(axes, f"{label}, from round {shown[0].round}", unit)
    plots.time_legend(figure, [row for its in rounds.values() for r in its for row in r.workers])
    plots.save(figure, path)


def _panels(rows: Sequence[int]) -> tuple[Figure, Sequence[Any]]:
    """Return a figure with a column of panels, and the panels, for these numbers of rows."""
    heights = [1.1 + 0.3 * count for count in rows]
    figure = Figure(figsize=(11, 0.6 + sum(heights)), layout="constrained")
    return figure, list(figure.subplots(len(rows), squeeze=False, height_ratios=heights)[:, 0])


def _rounds(run: Run) -> list[RoundRecord]:
    """Return the rounds on the run's clock without the first, in which processes warm up."""
    rounds = metrics_of(run["folder"], run).rounds_on_clock()
    return rounds[1:] or rounds


def _seconds_per_round(run: Run) -> dict[str, Any]:
    """Return the mean seconds of computing, waiting and the whole round for each worker."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for record in _rounds(run):
        for row in record.workers:
            busy = row.summing_seconds + row.compute_seconds
            parts = (busy, row.waiting_seconds, record.round_seconds)
            found.setdefault(row.label, []).append(parts)
    return {label: np.mean(parts, axis=0) for label, parts in found.items()}


def _clock(runs: Runs) -> tuple[str, str]:
    """Return the column with the seconds of the runs' clock, and the label of their axis."""
    return plots.TIME_AXES[_first(runs)["clock"]]


def _first(runs: Runs) -> Run:
    return next(iter(runs.values()))[0]


FIGURES: Mapping[str, Callable[[Runs, Path], None]] = {
    "features": draw_features,
    "figure-timing": draw_timing,
    "figure-schedule": draw_schedule,
    "figure-learning-curves": draw_learning_curves,
}
"""Functions that draw a reproduction, by its name; the others are tables."""
