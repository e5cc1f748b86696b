"""The pictures of a run: its learning curve, and who computed and who waited."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..round_log import RoundRecord
from .folder import EpochRow

# Okabe and Ito's colours can be told apart with any kind of colour vision.
_COMPUTE, _WAIT, _MOVE, _LINE = "#0072B2", "#E69F00", "#BBBBBB", "#009E73"
_ROUNDS_SHOWN = 8


def draw_learning_curve(rows: Sequence[EpochRow], title: str, path: Path) -> None:
    """Draw accuracy over epochs and over seconds of training.

    Parameters
    ----------
    rows : sequence of EpochRow
        Those without an accuracy are left out.
    title : str
        Which run this is.
    path : Path
        A PNG file.
    """
    measured = [row for row in rows if row.accuracy is not None]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    accuracy = [100 * (row.accuracy or 0.0) for row in measured]
    left.plot([row.epoch for row in measured], accuracy, "o-", color=_LINE, markersize=4)
    left.set_xlabel("epoch")
    left.set_ylabel("test accuracy (%)")
    left.xaxis.get_major_locator().set_params(integer=True)
    right.plot([r.training_seconds for r in measured], accuracy, "o-", color=_LINE, markersize=4)
    right.set_xlabel("training time (s)")
    for axes in (left, right):
        _plain(axes)
        axes.grid(alpha=0.3)
    if measured:
        best = max(accuracy)
        left.axhline(best, color="gray", linestyle=":", linewidth=1)
        left.annotate(
            f"best {best:.1f} %",
            (measured[0].epoch, best),
            textcoords="offset points",
            xytext=(0, 4),
            color="dimgray",
        )
    figure.suptitle(title)
    _save(figure, path)


def draw_timeline(records: Sequence[RoundRecord], title: str, path: Path) -> None:
    """Draw what every worker did in the last rounds, and its shares over the whole run.

    Parameters
    ----------
    records : sequence of RoundRecord
        All rounds of the run.
    title : str
        Which run this is.
    path : Path
        A PNG file.
    """
    labels = {row.worker: row.label for record in records for row in record.workers}
    order = sorted(labels, reverse=True)  # the first worker on top
    place = {worker: y for y, worker in enumerate(order)}
    height = 2.4 + 0.42 * len(order)
    figure = Figure(figsize=(11, height), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1.3])
    shown = records[-_ROUNDS_SHOWN:]
    now = 0.0
    for record in shown:
        left.axvline(now, color="black", linewidth=0.6, alpha=0.5)
        for row in record.workers:
            y, start = place[row.worker], now + row.start_seconds
            left.barh(y, record.round_seconds, left=now, color=_MOVE, height=0.62)
            left.barh(y, row.compute_seconds, left=start, color=_COMPUTE, height=0.62)
            waiting_from = start + row.compute_seconds
            left.barh(y, row.waiting_seconds, left=waiting_from, color=_WAIT, height=0.62)
        now += record.round_seconds
    left.set_xlim(0, now or 1)
    left.set_yticks(list(place.values()), [labels[worker] for worker in order])
    left.set_xlabel(f"seconds (last {len(shown)} of {len(records)} rounds; a line begins a round)")
    _draw_shares(right, records, place)
    for axes in (left, right):
        _plain(axes)
        axes.tick_params(axis="y", length=0)
    figure.suptitle(title)
    figure.legend(
        handles=[
            Patch(color=_COMPUTE, label="computing"),
            Patch(color=_WAIT, label="waiting for the last worker"),
            Patch(color=_MOVE, label="transfer and averaging"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    _save(figure, path)


def _draw_shares(axes: Axes, records: Sequence[RoundRecord], place: dict[int, int]) -> None:
    total = sum(record.round_seconds for record in records) or 1.0
    for worker, y in place.items():
        rows = [row for record in records for row in record.workers if row.worker == worker]
        compute = 100 * sum(row.compute_seconds for row in rows) / total
        waiting = 100 * sum(row.waiting_seconds for row in rows) / total
        axes.barh(y, 100, color=_MOVE, height=0.62)
        axes.barh(y, compute, color=_COMPUTE, height=0.62)
        axes.barh(y, waiting, left=compute, color=_WAIT, height=0.62)
        for share, start, color in ((compute, 0.0, "white"), (waiting, compute, "black")):
            if share >= 12:
                axes.text(
                    start + share / 2, y, f"{share:.0f} %", ha="center", va="center", color=color
                )
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the whole run (%)")


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)
