"""Draw a run's pictures: accuracy, which samples were chosen, how long each worker waited."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..algorithm.local_steps import Clock
from ..strategy.round_metrics import RoundRecord
from .folder import EpochRow

# Okabe and Ito's colours can be told apart with any kind of colour vision.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY = "#CC79A7", "#56B4E9"
GREY = "#BBBBBB"
DARK = "#555555"
_ALL = "#888888"
_LOG_FROM_RATIO = 30
"""Losses that span more than this, from their lowest to their highest, get a log scale."""

_COMPUTE, _WAIT, _MOVE, _SUM = BLUE, ORANGE, GREY, GREEN
_FAILED: dict[str, Any] = {"facecolor": "white", "edgecolor": VERMILION, "hatch": "////"}
_ROUNDS_SHOWN = 8
_HEIGHT = 0.62


def draw_learning_curve(
    rows: Sequence[EpochRow], title: str, path: Path, clock: Clock = "wall"
) -> None:
    """Draw accuracy over epochs and over seconds of training.

    Parameters
    ----------
    rows : sequence of EpochRow
        Those without an accuracy are left out.
    title : str
        Which run this is.
    path : Path
        A PNG file.
    clock : {"wall", "device"} (default: "wall")
        Which seconds; if those of simulated devices are not known, the measured ones.
    """
    measured = [(row, 100 * row.accuracy) for row in rows if row.accuracy is not None]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(title)
    if not measured:
        draw_text_instead(figure.subplots(), "no test accuracy was measured")
        save(figure, path)
        return
    left, right = figure.subplots(1, 2, sharey=True)
    accuracy = [percent for _, percent in measured]
    seconds: list[float] = [row.training_seconds for row, _ in measured]
    unit = "training time (s)"
    simulated = [row.device_seconds for row, _ in measured if row.device_seconds is not None]
    if clock == "device" and len(simulated) == len(measured):
        seconds, unit = simulated, "training time on simulated devices (s, computed)"
    epochs = [row.epoch for row, _ in measured]
    best = max(accuracy)
    best_at = accuracy.index(best)
    for axes, along in ((left, epochs), (right, seconds)):
        axes.plot(along, accuracy, ".-", color=GREEN)
        axes.axhline(best, color="gray", linestyle=":", linewidth=1, zorder=0)
        axes.plot(along[best_at], best, "o", color=DARK, fillstyle="none", markersize=9)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        hide_frame(axes)
    _label_epochs(left)
    left.set_ylabel("test accuracy (%)")
    right.set_xlabel(unit)
    found = (f"in epoch {epochs[best_at]}", f"after {seconds[best_at]:.3g} s")
    for axes, when in zip((left, right), found, strict=True):
        axes.set_title(f"best {best:.1f} % {when} (circle)", loc="left", fontsize=10, color=DARK)
    save(figure, path)


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
    elif any(row.epoch > 1 for row in rows):
        draw_text_instead(figure.subplots(), "no worker reported its losses")
    else:
        why = "samples are chosen by their losses from the second epoch on"
        draw_text_instead(figure.subplots(), why)
    save(figure, path)


def _draw_losses(axes: Axes, rows: Sequence[EpochRow]) -> None:
    stats = [row.sampling for row in rows]
    epochs = [row.epoch for row in rows]
    low, high = [s.all_loss_p10 for s in stats], [s.all_loss_p90 for s in stats]
    label = "all samples, from the 10th to the 90th percentile"
    axes.fill_between(epochs, low, high, color=GREY, alpha=0.4, linewidth=0, label=label)
    means = [
        ([s.all_loss_mean for s in stats], _ALL, 4.0, "all samples, mean"),
        ([s.slow_picked_loss_mean for s in stats], BLUE, 1.6, "given to slow workers, mean"),
        ([s.fast_picked_loss_mean for s in stats], VERMILION, 1.6, "given to fast workers, mean"),
    ]
    for values, color, width, label in means:  # a broad line shows under one of the same values
        _line(axes, epochs, values, label, color=color, linewidth=width)
    known = [value for values, *_ in means for value in values if math.isfinite(value)]
    if min(known) > 0 and max(*high, *known) >= _LOG_FROM_RATIO * min(known):
        # The easiest samples' losses go to 0: the band may leave the picture, the lines may not.
        axes.set_yscale("log")
        axes.set_ylim(min(known) / 10, 1.5 * max(*high, *known))
    _finish(axes, "Loss of the samples that workers were given")
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
        epochs = [row.epoch for row in rows]
        _line(axes, epochs, values, label, color=color, linestyle=style, linewidth=1.6)
    axes.set_ylim(bottom=0)
    _finish(axes, "How old those recorded losses were")
    axes.set_ylabel("age (epochs)")


def _line(
    axes: Axes, epochs: Sequence[int], values: Sequence[float], label: str, **style: Any
) -> None:
    """Draw what is known of a line; one of which nothing is known is left out."""
    if any(math.isfinite(value) for value in values):
        axes.plot(epochs, values, marker=".", label=label, **style)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    _label_epochs(axes)
    axes.grid(alpha=0.3)
    hide_frame(axes)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False, reverse=True)


def _label_epochs(axes: Axes) -> None:
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


# --- how long each worker computed and waited


def draw_timeline(records: Sequence[RoundRecord], title: str, path: Path) -> None:
    """Draw what every worker did in the last rounds, and its shares over the whole run.

    Parameters
    ----------
    records : sequence of RoundRecord
        All rounds of the run, at least one.
    title : str
        Which run this is.
    path : Path
        A PNG file.
    """
    labels = {row.worker: row.label for record in records for row in record.workers}
    order = sorted(labels, reverse=True)  # the first worker on top
    y_of = {worker: y for y, worker in enumerate(order)}
    figure = Figure(figsize=(11, 2.6 + 0.42 * len(order)), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1.3])
    left.set_yticks(list(y_of.values()), [labels[worker] for worker in order])
    _draw_rounds(left, records, y_of)
    _draw_shares(right, records, y_of)
    for axes in (left, right):
        hide_frame(axes)
        axes.tick_params(axis="y", length=0)
    handles = [
        Patch(color=_COMPUTE, label="computing"),
        Patch(color=_WAIT, label="waiting for the last worker"),
        Patch(color=_MOVE, label="transfer, averaging, queueing for a device"),
    ]
    if any(row.summing_seconds for record in records for row in record.workers):
        handles.append(Patch(color=_SUM, label="summing up models"))
    if any(row.failure for record in records for row in record.workers):
        handles.append(Patch(**_FAILED, label="failed, counts 0"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def _draw_rounds(axes: Axes, records: Sequence[RoundRecord], y_of: dict[int, int]) -> None:
    shown = records[-_ROUNDS_SHOWN:]
    total = sum(record.round_seconds for record in shown)
    now = 0.0
    for record in shown:
        axes.axvline(now, color="black", linewidth=0.6, alpha=0.5)
        for row in record.workers:
            y, start = y_of[row.worker], now + row.start_seconds
            if row.failure:
                axes.barh(y, record.round_seconds, left=now, height=_HEIGHT, **_FAILED)
                continue
            if not row.trained:
                axes.barh(y, row.summing_seconds, left=start, color=_SUM, height=_HEIGHT)
                continue
            axes.barh(y, record.round_seconds, left=now, color=_MOVE, height=_HEIGHT)
            axes.barh(y, row.compute_seconds, left=start, color=_COMPUTE, height=_HEIGHT)
            waiting_from = start + row.compute_seconds
            axes.barh(y, row.waiting_seconds, left=waiting_from, color=_WAIT, height=_HEIGHT)
        if record.round_seconds > 0.03 * total:
            middle = now + record.round_seconds / 2
            axes.text(
                middle, len(y_of) - 0.5, str(record.round), ha="center", color=DARK, fontsize=9
            )
        now += record.round_seconds
    axes.set_xlim(0, now)
    axes.set_ylim(-0.6, len(y_of) - 0.1)
    axes.set_xlabel("seconds")
    title = f"the last {len(shown)} of {len(records)} rounds (their numbers on top)"
    axes.set_title(title, loc="left", fontsize=10, color=DARK)


def _draw_shares(axes: Axes, records: Sequence[RoundRecord], y_of: dict[int, int]) -> None:
    total = sum(record.round_seconds for record in records)
    for worker, y in y_of.items():
        parts = [(r, row) for r in records for row in r.workers if row.worker == worker]
        done = [(record, row) for record, row in parts if not row.failure]
        compute = 100 * sum(row.compute_seconds for _, row in done) / total
        summing = 100 * sum(row.summing_seconds for _, row in done) / total
        waiting = 100 * sum(row.waiting_seconds for _, row in done) / total
        answered = 100 * sum(r.round_seconds for r, row in done if row.trained) / total
        there = 100 * sum(record.round_seconds for record, _ in parts) / total
        axes.barh(y, answered, color=_MOVE, height=_HEIGHT)
        axes.barh(y, compute, color=_COMPUTE, height=_HEIGHT)
        axes.barh(y, summing, color=_SUM, height=_HEIGHT)
        axes.barh(y, waiting, left=compute, color=_WAIT, height=_HEIGHT)
        if len(done) < len(parts):
            axes.barh(y, there - answered, left=answered, height=_HEIGHT, **_FAILED)
            failed = f"failed {len(parts) - len(done)}x"
            axes.text(102, y, failed, va="center", color=VERMILION, fontsize=9)
        for share, start, color in ((compute, 0.0, "white"), (waiting, compute, "black")):
            if share >= 15:
                axes.text(
                    start + share / 2, y, f"{share:.0f} %", ha="center", va="center", color=color
                )
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the time (%)")
    axes.set_title("the whole run", loc="left", fontsize=10, color=DARK)


# --- the style of all pictures


def hide_frame(axes: Axes) -> None:
    """Hide the frame where no axis is."""
    axes.spines[["top", "right"]].set_visible(False)


def draw_text_instead(axes: Axes, text: str) -> None:
    """Write a text where there is nothing to draw."""
    axes.set_axis_off()
    axes.text(
        0.5, 0.5, text, ha="center", va="center", color=DARK, fontsize=13, transform=axes.transAxes
    )


def save(figure: Figure, path: Path) -> None:
    """Write a PNG file."""
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)
