"""The picture of a run's accuracy."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..algorithm.local_steps import Clock
from .folder import EpochRow
from .picture_style import DARK, GREEN, epochs_below, marker_size, plain, save, say_instead


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
        say_instead(figure.subplots(), "no test accuracy was measured")
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
        axes.plot(along, accuracy, "o-", color=GREEN, markersize=marker_size(len(accuracy)))
        axes.axhline(best, color="gray", linestyle=":", linewidth=1, zorder=0)
        axes.plot(along[best_at], best, "o", color=DARK, fillstyle="none", markersize=9)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        plain(axes)
    epochs_below(left)
    left.set_ylabel("test accuracy (%)")
    right.set_xlabel(unit)
    found = (f"in epoch {epochs[best_at]}", f"after {seconds[best_at]:.3g} s")
    for axes, when in zip((left, right), found, strict=True):
        axes.set_title(f"best {best:.1f} % {when} (circle)", loc="left", fontsize=10, color=DARK)
    save(figure, path)
