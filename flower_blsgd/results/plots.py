"""Draw the pictures of a run: accuracy, chosen samples, and how long each worker waited.

Each function writes a PNG file with a title that identifies the run.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, MaxNLocator

from ..algorithm.local_steps import Clock
from ..strategy.round_metrics import RoundRecord, WorkerRound
from .folder import EpochRow
from .metric import ACCURACY, Metric
from .tables import brief

# Okabe and Ito's colours are distinct with any kind of colour vision.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY = "#CC79A7", "#56B4E9"
GREY = "#BBBBBB"
DARK = "#555555"
_ALL = "#888888"

TIME_AXES: Mapping[Clock, tuple[str, str]] = {
    "wall": ("training_seconds", "training time (s)"),
    "device": ("device_seconds", "training time on simulated devices (s, computed)"),
}
"""For each clock the column of ``epochs.csv`` with the seconds, and the label of their axis."""

_LOG_FROM_RATIO = 30
"""Ratio of the highest to the lowest mean loss from which the axis is logarithmic."""

# Figures of `SamplingStats`: label, colour, line style and width. A broad line stays visible under
# a line with the same values.
_LOSSES = {
    "all_loss_mean": ("all samples, mean", _ALL, "-", 4.0),
    "slow_picked_loss_mean": ("given to slow workers, mean", BLUE, "-", 1.6),
    "fast_picked_loss_mean": ("given to fast workers, mean", VERMILION, "-", 1.6),
}
_AGES = {
    "loss_age_epochs_mean": ("all samples, mean", _ALL, "-", 1.6),
    "loss_age_epochs_p90": ("all samples, 90th percentile", _ALL, ":", 1.6),
    "left_out_age_epochs_mean": ("not given to a fast worker, mean", PURPLE, "-", 1.6),
    "left_out_age_epochs_p90": ("not given to a fast worker, 90th percentile", PURPLE, ":", 1.6),
}

COMPUTE, WAIT, MOVE, SUM = BLUE, ORANGE, GREY, GREEN
_FAILED: dict[str, Any] = {"facecolor": "white", "edgecolor": VERMILION, "hatch": "////"}
_ROUNDS_SHOWN = 8
_ROUNDS_NUMBERED = 12
_HEIGHT = 0.62


def draw_learning_curve(
    rows: Sequence[EpochRow],
    title: str,
    path: Path,
    clock: Clock = "wall",
    metric: Metric = ACCURACY,
) -> None:
    """Draw accuracy, or another metric, over epochs and over seconds of training.

    With the clock "device" these are seconds on simulated devices, if all are known.
    """
    rows = [row for row in rows if row.value is not None and math.isfinite(row.value)]
    shown = [metric.scale * (row.value or 0.0) for row in rows]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(title)
    if not rows:
        save_text_instead(figure, f"no {metric.split} {metric.name} was measured", path)
        return
    all_known = all(row.device_seconds is not None for row in rows)
    column, unit = TIME_AXES[clock if all_known else "wall"]
    seconds = [getattr(row, column) for row in rows]
    best_at = metric.best(shown)
    best = shown[best_at]
    left, right = figure.subplots(1, 2, sharey=True)
    panels: list[tuple[Axes, str, Sequence[float], str]] = [
        (left, "epoch", [row.epoch for row in rows], f"in epoch {rows[best_at].epoch}"),
        (right, unit, seconds, f"after {brief(seconds[best_at])} s"),
    ]
    for axes, label, along, when in panels:
        axes.plot(along, shown, ".-", color=GREEN)
        axes.set_xlim(left=0)
        axes.plot(along[best_at], best, "o", color=DARK, fillstyle="none", markersize=9)
        figure_text = f"{best:.1f}" if metric.is_accuracy else f"{best:.4g}"
        title = f"best {figure_text}{metric.unit} {when} (circle)"
        style_panel(axes, title, label, grid=True)
    left.set_ylabel(f"{metric.split} {metric.name}{' (%)' * metric.is_accuracy}")
    save(figure, path)


def draw_sampling(rows: Sequence[EpochRow], title: str, path: Path) -> None:
    """Draw the recorded losses of the samples of each tier, and their age, by epoch.

    Epochs without a recorded loss, such as the first, are left out.
    """
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    figure.suptitle(title)
    known = [row for row in rows if math.isfinite(row.sampling.all_loss_mean)]
    if not known:
        text = "no epoch started with recorded losses (the first never does)"
        save_text_instead(figure, text, path)
        return
    losses, ages = figure.subplots(1, 2)
    epochs, stats = [row.epoch for row in known], [row.sampling for row in known]
    low, high = [s.all_loss_p10 for s in stats], [s.all_loss_p90 for s in stats]
    label = "all samples, from the 10th to the 90th percentile"
    losses.fill_between(epochs, low, high, color=GREY, alpha=0.4, linewidth=0, label=label)
    for axes, lines in ((losses, _LOSSES), (ages, _AGES)):
        for name, (label, color, style, width) in lines.items():
            values = [getattr(s, name) for s in stats]
            if any(math.isfinite(value) for value in values):
                axes.plot(epochs, values, style, marker=".", label=label, color=color, lw=width)
    means = [value for s in stats for name in _LOSSES if math.isfinite(value := getattr(s, name))]
    if 0 < _LOG_FROM_RATIO * min(means) <= max(*high, *means):
        # Losses of the easiest samples go to 0: the band may leave the picture, but no line.
        losses.set_yscale("log")
        losses.set_ylim(min(means) / 10, 1.5 * max(*high, *means))
    ages.set_ylim(bottom=0)
    style_panel(losses, "Loss of the samples of the workers", "epoch", grid=True)
    style_panel(ages, "Age of the recorded losses", "epoch", grid=True)
    losses.set_ylabel("last recorded loss at the start of the epoch")
    ages.set_ylabel("age (epochs)")
    for axes in (losses, ages):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False, reverse=True)
    save(figure, path)


def draw_timeline(records: Sequence[RoundRecord], title: str, path: Path) -> None:
    """Draw what every worker did in the last rounds, and its shares of the whole run.

    `records` has all rounds, at least one.
    """
    rows = [row for record in records for row in record.workers]
    labels = {row.worker: row.label for row in rows}
    y_of = {worker: y for y, worker in enumerate(sorted(labels, reverse=True))}  # the first on top
    figure = Figure(figsize=(11, 2.6 + 0.42 * len(y_of)), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1.3])
    left.set_yticks(list(y_of.values()), [labels[worker] for worker in y_of])
    shown = records[-_ROUNDS_SHOWN:]
    draw_rounds(left, shown, y_of)
    about = f"the last {len(shown)} of {len(records)} rounds (their numbers on top)"
    style_panel(left, about, "seconds")
    _draw_shares(right, records, y_of)
    style_panel(right, "the whole run", "share of the time (%)")
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
    time_legend(figure, rows)
    save(figure, path)


def time_legend(figure: Figure, rows: Sequence[WorkerRound] = ()) -> None:
    """Add a legend of the colours of a worker's time that these rows need."""
    handles = [
        Patch(color=COMPUTE, label="computing"),
        Patch(color=WAIT, label="waiting for the last worker"),
        Patch(color=MOVE, label="transfer, averaging, queueing for a device"),
    ]
    if any(row.summing_seconds for row in rows):
        handles.append(Patch(color=SUM, label="summing models"))
    if any(row.failure for row in rows):
        handles.append(Patch(**_FAILED, label="failed, weight 0"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)


def draw_rounds(axes: Axes, shown: Sequence[RoundRecord], y_of: Mapping[int, int]) -> None:
    """Draw consecutive rounds from 0 s: what every worker did, in its own row."""
    now = 0.0
    for record in shown:
        axes.axvline(now, color="black", linewidth=0.6, alpha=0.5)
        middle, top = now + record.round_seconds / 2, len(y_of) - 0.5
        if len(shown) <= _ROUNDS_NUMBERED:
            number = axes.text(middle, top, str(record.round), ha="center", clip_on=True)
            number.set(color=DARK, fontsize=9)
        for row in record.workers:
            start = now + row.start_seconds
            whole: dict[str, Any] = _FAILED if row.failure else {"color": MOVE}
            bars = [
                (now, record.round_seconds if row.trained else 0.0, whole),
                (start, row.summing_seconds, {"color": SUM}),
                (start, row.compute_seconds, {"color": COMPUTE}),
                (start + row.compute_seconds, row.waiting_seconds, {"color": WAIT}),
            ]
            for left, length, style in bars:
                if length:
                    axes.barh(y_of[row.worker], length, left=left, height=_HEIGHT, **style)
        now += record.round_seconds
    axes.set_xlim(0, now)
    axes.set_ylim(-0.6, len(y_of) - 0.1)


def _draw_shares(axes: Axes, records: Sequence[RoundRecord], y_of: Mapping[int, int]) -> None:
    percent = 100 / sum(record.round_seconds for record in records)
    for worker, y in y_of.items():
        its = [(r.round_seconds, row) for r in records for row in r.workers if row.worker == worker]
        failed = [seconds for seconds, row in its if row.failure]
        answered = percent * (sum(seconds for seconds, row in its if row.trained) - sum(failed))
        useful = [row for _, row in its if not row.failure]
        computed = percent * sum(row.compute_seconds for row in useful)
        summed = percent * sum(row.summing_seconds for row in useful)
        waited = percent * sum(row.waiting_seconds for row in useful)
        axes.barh(y, answered, color=MOVE, height=_HEIGHT)
        axes.barh(y, computed, color=COMPUTE, height=_HEIGHT)
        axes.barh(y, summed, color=SUM, height=_HEIGHT)
        axes.barh(y, waited, left=computed, color=WAIT, height=_HEIGHT)
        if failed:
            axes.barh(y, percent * sum(failed), left=answered, height=_HEIGHT, **_FAILED)
            text = f"failed {len(failed)}x"
            axes.text(102, y, text, va="center", color=VERMILION, fontsize=9)
        for part, middle, color in (
            (computed, computed / 2, "white"),
            (waited, computed + waited / 2, "black"),
        ):
            if part >= 15:
                axes.text(middle, y, f"{part:.0f} %", ha="center", va="center", color=color)
    axes.set_xlim(0, 100)


# --- the style of all pictures


def style_panel(axes: Axes, title: str, x: str, grid: bool = False) -> None:
    """Set the title and the x label of a panel, and hide the frame where there is no axis."""
    axes.set_title(title, loc="left", fontsize=10, color=DARK)
    axes.set_xlabel(x)
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(alpha=0.3)
    if x == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def save_text_instead(figure: Figure, text: str, path: Path) -> None:
    """Write a PNG file with a text on why there is nothing to draw."""
    figure.text(0.5, 0.5, text, ha="center", va="center", color=DARK, fontsize=13)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG file; all text is literal, since a name may contain a ``$``."""
    FigureCanvasAgg(figure)
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if axis.get_scale() == "log":  # its labels are in math otherwise
            axis.set_major_formatter(LogFormatter())
            axis.set_minor_formatter(LogFormatter())
    with matplotlib.rc_context({"text.parse_math": False}):  # ticks are created while drawing
        figure.savefig(path, dpi=130)
