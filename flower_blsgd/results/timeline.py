"""The picture of who computed and who waited."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..round_log import RoundRecord, WorkerRound
from .picture_style import BLUE, DARK, GREEN, GREY, ORANGE, VERMILION, plain, save

_COMPUTE, _WAIT, _MOVE, _FAILED, _SUM = BLUE, ORANGE, GREY, VERMILION, GREEN
_ROUNDS_SHOWN = 8
_HEIGHT = 0.62
_LONGEST_LABEL = 32


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
    figure = Figure(figsize=(11, 2.6 + 0.42 * len(order)), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1.3])
    left.set_yticks(list(place.values()), [_short(labels[worker]) for worker in order])
    _draw_rounds(left, records, place)
    _draw_shares(right, records, place)
    for axes in (left, right):
        plain(axes)
        axes.tick_params(axis="y", length=0)
    other = "transfer and averaging"
    if any(_may_queue(record) for record in records):
        other += ", or queued for the same device"
    handles = [
        Patch(color=_COMPUTE, label="computing"),
        Patch(color=_WAIT, label="waiting for the last worker"),
        Patch(color=_MOVE, label=other),
    ]
    if any(row.summing_seconds for record in records for row in record.workers):
        handles.append(Patch(color=_SUM, label="adding up models"))
    if any(row.failure for record in records for row in record.workers):
        handles.append(_failed_patch())
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def _draw_rounds(axes: Axes, records: Sequence[RoundRecord], place: dict[int, int]) -> None:
    shown = records[-_ROUNDS_SHOWN:]
    total = sum(record.round_seconds for record in shown)
    now = 0.0
    for record in shown:
        axes.axvline(now, color="black", linewidth=0.6, alpha=0.5)
        for row in record.workers:
            y, start = place[row.worker], now + row.start_seconds
            if row.failure:
                _bar_of_failure(axes, y, now, record.round_seconds)
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
                middle, len(place) - 0.5, str(record.round), ha="center", color=DARK, fontsize=9
            )
        now += record.round_seconds
    axes.set_xlim(0, now or 1)
    axes.set_ylim(-0.6, len(place) - 0.1)
    axes.set_xlabel("seconds")
    if shown:
        axes.set_title(
            f"the last {len(shown)} of {len(records)} rounds (their numbers on top)",
            loc="left",
            fontsize=10,
            color=DARK,
        )


def _draw_shares(axes: Axes, records: Sequence[RoundRecord], place: dict[int, int]) -> None:
    total = sum(record.round_seconds for record in records) or 1.0
    for worker, y in place.items():
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
            _bar_of_failure(axes, y, answered, there - answered)
            failed = f"failed {len(parts) - len(done)}x"
            axes.text(102, y, failed, va="center", color=_FAILED, fontsize=9)
        for share, start, color in ((compute, 0.0, "white"), (waiting, compute, "black")):
            if share >= 15:
                axes.text(
                    start + share / 2, y, f"{share:.0f} %", ha="center", va="center", color=color
                )
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the time (%)")
    axes.set_title("the whole run", loc="left", fontsize=10, color=DARK)


def _bar_of_failure(axes: Axes, y: float, start: float, width: float) -> None:
    axes.barh(
        y,
        width,
        left=start,
        height=_HEIGHT,
        facecolor="white",
        edgecolor=_FAILED,
        hatch="////",
        linewidth=0.5,
    )


def _failed_patch() -> Patch:
    return Patch(facecolor="white", edgecolor=_FAILED, hatch="////", label="failed, counts 0")


def _short(label: str) -> str:
    """Leave out the end of a long name, but not the device behind it."""
    name, bracket, device = label.rpartition(" (")
    too_long = len(label) - _LONGEST_LABEL
    if too_long <= 0:
        return label
    kept = max(8, len(name) - too_long - 1)
    return f"{name[:kept]}\N{HORIZONTAL ELLIPSIS}{bracket}{device}"


def _may_queue(record: RoundRecord) -> bool:
    """Whether two workers on devices of one name computed one after the other.

    The record does not tell whether that device was one and the same: two hosts have a cpu each.
    """
    by_device: dict[str, list[WorkerRound]] = {}
    for row in record.workers:
        if row.compute_seconds > 0:
            by_device.setdefault(row.label.rpartition("(")[2], []).append(row)
    for rows in by_device.values():
        rows.sort(key=lambda row: row.start_seconds)
        for first, second in pairwise(rows):
            if second.start_seconds >= first.start_seconds + first.compute_seconds:
                return True
    return False
