"""The picture of which samples were picked, by their recorded losses, and how old those are."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .folder import EpochRow
from .picture_style import (
    BLUE,
    GREY,
    PURPLE,
    VERMILION,
    epochs_below,
    marker_size,
    plain,
    save,
    say_instead,
)

_ALL = "#888888"
_LOG_FROM_RATIO = 30
"""Losses that span more than this, from their lowest to their highest, get a log scale."""


def draw_sampling(rows: Sequence[EpochRow], title: str, path: Path) -> None:
    """Draw the recorded losses of what each tier was given, and how old they were, by epoch.

    Parameters
    ----------
    rows : sequence of EpochRow
        Those without a recorded loss are left out, as the first one is. If all are, the
        picture says why.
    title : str
        Which run this is.
    path : Path
        A PNG file.
    """
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    figure.suptitle(title)
    known = [row for row in rows if math.isfinite(row.sampling.all_loss_mean)]
    if known:
        left, right = figure.subplots(1, 2)
        _draw_losses(left, known)
        _draw_ages(right, known)
    else:
        say_instead(figure.subplots(), _why_nothing(rows))
    save(figure, path)


def _why_nothing(rows: Sequence[EpochRow]) -> str:
    if any(row.epoch > 1 for row in rows):
        return "no worker reported its losses:\nno sample could be chosen by its loss"
    return (
        "the first epoch records the losses:\n"
        "samples are chosen by them from the second epoch on, which this run did not finish"
    )


def _draw_losses(axes: Axes, rows: Sequence[EpochRow]) -> None:
    stats = [row.sampling for row in rows]
    low, high = [s.all_loss_p10 for s in stats], [s.all_loss_p90 for s in stats]
    means = [
        ([s.all_loss_mean for s in stats], _ALL, 4.0, "all samples, mean"),
        ([s.slow_picked_loss_mean for s in stats], BLUE, 1.6, "given to slow workers, mean"),
        ([s.fast_picked_loss_mean for s in stats], VERMILION, 1.6, "given to fast workers, mean"),
    ]
    _band(axes, rows, low, high, GREY, "all samples, from the 10th to the 90th percentile")
    for values, color, width, label in means:  # a broad line shows under one of the same values
        _line(axes, rows, values, label, color=color, linewidth=width)
    _scale(axes, [value for values, *_ in means for value in values], high)
    _finish(axes, "Loss of the samples that workers were given", rows)
    axes.set_ylabel("last recorded loss, as the epoch began")


def _draw_ages(axes: Axes, rows: Sequence[EpochRow]) -> None:
    stats = [row.sampling for row in rows]
    left_out = "not given to a fast worker"
    ages = [
        ([s.loss_age_epochs_mean for s in stats], _ALL, "-", "all samples, mean"),
        ([s.loss_age_epochs_p90 for s in stats], _ALL, ":", "all samples, 90th percentile"),
        ([s.left_out_age_epochs_mean for s in stats], PURPLE, "-", f"{left_out}, mean"),
        ([s.left_out_age_epochs_p90 for s in stats], PURPLE, ":", f"{left_out}, 90th percentile"),
    ]
    for values, color, style, label in ages:
        _line(axes, rows, values, label, color=color, linestyle=style, linewidth=1.6)
    axes.set_ylim(bottom=0)
    _finish(axes, "How old those recorded losses were", rows)
    axes.set_ylabel("age (epochs)")


def _line(
    axes: Axes, rows: Sequence[EpochRow], values: Sequence[float], label: str, **style: Any
) -> None:
    """Draw what is known of a line; one of which nothing is known is left out."""
    if any(math.isfinite(value) for value in values):
        epochs = [row.epoch for row in rows]
        size = marker_size(len(rows))
        axes.plot(epochs, values, marker="o", markersize=size, label=label, **style)


def _band(
    axes: Axes,
    rows: Sequence[EpochRow],
    low: Sequence[float],
    high: Sequence[float],
    color: str,
    label: str,
) -> None:
    epochs = [float(row.epoch) for row in rows]
    if len(rows) == 1:  # a band has a width
        epochs, low, high = [epochs[0] - 0.1, epochs[0] + 0.1], [*low, *low], [*high, *high]
    axes.fill_between(epochs, low, high, color=color, alpha=0.4, linewidth=0, label=label)


def _scale(axes: Axes, means: Sequence[float], high: Sequence[float]) -> None:
    """Use a log scale where the losses, but for the easiest, span more than a decade and a half."""
    known = [value for value in means if math.isfinite(value)]
    lowest, highest = min(known), max([*known, *high])
    if lowest <= 0 or highest < _LOG_FROM_RATIO * lowest:
        return
    axes.set_yscale("log")
    # The easiest samples' losses go to 0: the band may leave the picture, the lines may not.
    axes.set_ylim(lowest / 10, 1.5 * highest)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _finish(axes: Axes, title: str, rows: Sequence[EpochRow]) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    epochs_below(axes)
    if len(rows) == 1:
        axes.set_xlim(rows[0].epoch - 1, rows[0].epoch + 1)
    axes.grid(alpha=0.3)
    plain(axes)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],  # what was drawn last lies on top
        labels[::-1],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
        frameon=False,
    )
