"""The command ``blsgd watch``: show a run while it trains, with rich."""

import argparse
import contextlib
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..files import lost_output
from ..results.live import Curve, LiveRun, LiveWorker
from ..results.summary import blsgd_command, failures_line, final_line
from ..results.tables import brief, counted, seconds_text
from ..strategy.budget import NO_LIMIT
from .options import terminated_like_interrupted

_INTERVAL_SECONDS = 1.0
_WIDEST = 100
_CURVE_HEIGHT = 5
_WIDEST_COLUMN = 4
_BAR_WIDTH = 22
_PAUSE_SECONDS, _LONG_PAUSE_SECONDS = 15.0, 120.0
"""Pauses after which the view says how long there was no round, and what to do."""
_BLOCKS = " ▁▂▃▄▅▆▇█"


def _add_watch(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "run", nargs="?", default="runs/latest", help="folder of a run (default: runs/latest)"
    )


def _watch(options: argparse.Namespace) -> None:
    # At Ctrl-C, SIGTERM and SIGHUP the view removes itself; the run continues.
    with contextlib.suppress(KeyboardInterrupt, SystemExit), terminated_like_interrupted():
        _follow(Path(options.run))


def _follow(folder: Path) -> None:
    console = Console(highlight=False, emoji=False, markup=False)
    with contextlib.closing(LiveRun(folder)) as run:
        run.update()
        if console.is_terminal and run.summary is None:
            with Live(console=console, auto_refresh=False, transient=True) as live:
                # A closed terminal is no longer a terminal.
                while run.summary is None and console.is_terminal and not lost_output:
                    live.update(view(run, console.width), refresh=True)
                    time.sleep(_INTERVAL_SECONDS)
                    run.update()
        console.print(view(run, console.width))


def view(run: LiveRun, width: int) -> RenderableType:
    """Return what is shown of a run: progress, failures, curve, workers, and how it ended.

    Workers are last during a run: rich cuts off what a terminal has no lines for. `width` is that
    of the terminal.
    """
    parts: list[RenderableType] = [_progress(run), *map(Text, _state(run))]
    if curve := run.curve:
        lines = curve_lines(curve, min(width, _WIDEST))
        parts += [Text(), Text(_curve_title(run, curve))]
        parts += [Text(line, no_wrap=True, overflow="crop") for line in lines]
    if workers := run.workers:
        parts += [Text(), _workers(run, workers)]
    if run.summary is not None:
        parts += [Text(), *map(Text, _end(run, run.summary))]
    return Constrain(Group(*parts), _WIDEST)


# --- progress


def _progress(run: LiveRun) -> RenderableType:
    config = run.config
    last = run.last
    title = Text(f"{run.folder.name}: {config.algorithm} on {config.task}", "bold")
    if last is None:
        return title
    limited = config.seconds or config.epochs >= NO_LIMIT
    of_epochs = "" if limited else f"/{config.epochs}"
    words = [
        f"epoch {last.epoch}{of_epochs}",
        f"round {last.round_in_epoch}/{last.rounds_in_epoch}",
    ]
    if run.summary is None and run.seconds_left is not None:
        words.append(f"{_duration(run.seconds_left)} left")
    line = Table.grid(padding=(0, 2, 0, 0), expand=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_row(ProgressBar(total=1.0, completed=run.share_done), "  ".join(words))
    return Group(title, line)


# --- curve


def _curve_title(run: LiveRun, curve: Curve) -> str:
    text = curve.metric.measured(curve.values[-1])
    if curve.over == "epoch":
        best = curve.metric.best(curve.values)
        shown = curve.metric.shown(curve.values[best])
        text += f", best {shown} in epoch {curve.positions[best]}"
        if run.last is not None and math.isfinite(run.last.train_loss):
            text += f"; train loss {run.last.train_loss:.4g}"
    return text


def curve_lines(curve: Curve, width: int) -> list[str]:
    """Return a curve as columns of blocks, with the lowest and the highest value on the left."""
    ends = [curve.metric.shown(end(curve.values)) for end in (max, min)]
    margin = max(map(len, ends)) + 1
    columns = curve_columns(curve.values, width - margin - 1, _CURVE_HEIGHT)
    labels = [ends[0], *[""] * (_CURVE_HEIGHT - 2), ends[1]]
    lines = [f"{label:>{margin}} {row}" for label, row in zip(labels, columns, strict=True)]
    first, last = (str(curve.positions[i]) for i in (0, -1))
    first = f"{curve.over} {first}"
    return [
        *lines,
        f"{'':{margin}} {first}{last:>{max(len(last) + 1, len(columns[0]) - len(first))}}",
    ]


def curve_columns(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return rows of blocks, the highest first, with a column for each value or for several.

    >>> curve_columns([0.0, 1.0, 0.5], 3, 2)
    [' █▁', '▁██']
    """
    count = max(1, min(len(values), width))
    ends = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]
    low, high = min(means), max(means)
    levels = len(_BLOCKS) - 1
    each = max(1, min(_WIDEST_COLUMN, width // count))
    heights = [
        1 + round((mean - low) / ((high - low) or 1.0) * (levels * height - 1)) for mean in means
    ]
    return [
        "".join(_BLOCKS[min(levels, max(0, h - levels * row))] * each for h in heights)
        for row in reversed(range(height))
    ]


# --- workers


def _workers(run: LiveRun, workers: Sequence[LiveWorker]) -> Table:
    rounds = counted(len(run.rounds), "round")
    when = f"last {rounds}, {brief(run.recent_seconds, 2)} s"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()  # the only one that may wrap
    for justify in ("left", "right", "right", "left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    names = ("worker", "role", "steps", "samples/s", when, "busy", "waits")
    table.add_row(*(Text(name, "dim") for name in names))
    for worker in workers:
        if worker.role == "evaluate":
            table.add_row(worker.label, worker.role, "", "", _last_result(run))
            continue
        table.add_row(
            worker.label,
            worker.role,
            str(worker.local_steps or ""),
            f"{worker.samples_per_second:,.0f}",
            _bar(worker),
            f"{worker.computing:.0%}",
            f"{worker.waiting:.0%}",
        )
    return table


def _bar(worker: LiveWorker) -> Text:
    computing = round(worker.computing * _BAR_WIDTH)
    waiting = min(round(worker.waiting * _BAR_WIDTH), _BAR_WIDTH - computing)
    return Text.assemble(
        ("█" * computing, "green"),
        " " * (_BAR_WIDTH - computing - waiting),
        ("░" * waiting, "yellow"),
    )


def _last_result(run: LiveRun) -> str:
    if run.last_late is None:
        return "no result yet"
    epoch, seconds = run.last_late
    return f"epoch {epoch}, {seconds_text(seconds)} s late"


# --- lines of text


def _state(run: LiveRun) -> list[str]:
    lines = []
    if run.failures:
        lines.append(f"{failures_line(run.failures)}; last in {run.last_failure}")
    elif run.last:
        lines.append("no failures")
    if run.config.clock == "device":
        lines.append("the shares are as measured here, not those of the simulated devices")
    if run.summary is not None:
        return lines
    idle = run.idle_seconds
    pause = _duration(idle)
    if run.last is None:
        lines.append(f"no round yet, for {pause}")
    elif idle > _PAUSE_SECONDS:
        lines.append(f"no new round for {pause}")
    if idle > _LONG_PAUSE_SECONDS:
        resume = blsgd_command(run.config, "--resume", str(run.folder))
        lines[-1] += f"; if the run was killed: {resume}"
    return lines


def _end(run: LiveRun, summary: Mapping[str, Any]) -> list[str]:
    lines = [final_line(summary, run.config, run.folder)]
    if run.idle_seconds > _PAUSE_SECONDS:  # a new run has no folder before its workers have started
        lines.append(f"this run ended {_duration(run.idle_seconds)} ago")
    return lines


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
