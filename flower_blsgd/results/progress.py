"""Show the progress of a run: a line per epoch, and a live line in a terminal."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..strategy.budget import NO_LIMIT, Budget
from ..strategy.round_metrics import RoundRecord
from .folder import EpochRow, shown_late
from .history import RunHistory
from .round_totals import RunMetrics

OnRoundEnd = Callable[[RoundRecord], object]
OnEpochEnd = Callable[[EpochRow], object]


class _Screen(Console):
    """Standard output, whose reader may end before the run."""

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        self.quiet = True


class ProgressView:
    """Shows epoch, round, accuracy, samples per second, waiting shares and the time left.

    It prints one line per epoch. In a terminal, a live line below them is rewritten after every
    round. Permanent lines are printed only with `lines`. `console` is standard output by default.
    The callbacks get each record after a round, each row after an epoch or a late result, and the
    path of the results folder when there is one.
    """

    def __init__(
        self,
        budget: Budget,
        console: Console | None = None,
        lines: bool = True,
        on_round_end: OnRoundEnd | None = None,
        on_epoch_end: OnEpochEnd | None = None,
        on_folder: Callable[[Path], object] | None = None,
    ) -> None:
        self._budget, self._lines = budget, lines
        self._on_round_end, self._on_epoch_end = on_round_end, on_epoch_end
        self.on_folder: Callable[[Path], object] = on_folder or (lambda path: None)
        unlimited = budget.seconds or budget.epochs >= NO_LIMIT
        self._of_epochs = "" if unlimited else f"/{budget.epochs}"
        # In a notebook, rich would put each line into an HTML block of its own.
        plain = False if Console().is_jupyter else None
        self._console = console or _Screen(
            highlight=False,
            soft_wrap=True,
            emoji=False,
            force_jupyter=plain,
            force_terminal=plain,
        )
        self._live: Progress | None = None
        self._began = time.monotonic()
        self._share_done = self._share_before = 0.0

    def say(self, line: str) -> None:
        """Print a permanent line; the loss of the screen is no error."""
        if self._lines:
            encoding = self._console.encoding
            shown = line.encode(encoding, "replace").decode(encoding)
            with contextlib.suppress(OSError):
                self._console.print(escape(shown), emoji=False)

    def begin(self) -> None:
        """Start the live line in a terminal."""
        if self._console.is_terminal:
            self._live = Progress(
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
                refresh_per_second=8,
            )
            self._live.start()
            self._live.add_task("starting the workers", total=1.0)

    def add_round(self, record: RoundRecord, history: RunHistory) -> None:
        """Show a finished round, which the history already contains."""
        metrics = history.metrics
        used = Budget(record.epochs_done, metrics.budget_seconds, record.round, metrics.samples)
        if not self._share_done:  # starting the workers does not count
            self._began = time.monotonic() - record.round_seconds
            before = Budget(
                record.epochs_done - 1 / record.rounds_in_epoch,
                metrics.budget_seconds - metrics.last_budget_seconds,
                record.round - 1,
                metrics.samples - sum(row.num_examples for row in record.workers),
            )
            self._share_before = self._budget.share(before)
        self._share_done = min(1.0, self._budget.share(used))
        if self._live is not None:
            at = f"round {record.round_in_epoch}/{record.rounds_in_epoch}"
            text = self._line(metrics, f"epoch {record.epoch}{self._of_epochs}", at)
            self._live.update(TaskID(0), completed=self._share_done, description=escape(text))
        if self._on_round_end is not None:
            self._on_round_end(record)

    def add_epoch(self, row: EpochRow, history: RunHistory) -> Iterable[str]:
        """Return the line of a finished epoch, or of a result that arrived later."""
        width = len(self._of_epochs) - 1 if self._of_epochs else 3
        shown = history.metric.measured(row.value)
        accuracy = [shown] if shown else []
        number = f"epoch {row.epoch:{width}}{self._of_epochs}"
        if row.late:
            yield "  ".join([number, *accuracy, f"(arrived {shown_late(row.late)} later)"])
        else:
            loss = [] if math.isnan(row.train_loss) else [f"train loss {row.train_loss:.4f}"]
            yield self._line(history.metrics, number, *accuracy, *loss)
        if self._on_epoch_end is not None:
            self._on_epoch_end(row)

    def close(self) -> None:
        """Remove the live line; may be called twice."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def _line(self, metrics: RunMetrics, *parts: str) -> str:
        pace = ""
        for record in metrics.records[-1:]:
            shares = {"fast": metrics.waiting_share(True, last_round=True)}
            shares["slow"] = metrics.waiting_share(False, last_round=True)
            waits = [f"{tier} waits {x:.0%}" for tier, x in shares.items() if x is not None]
            examples = sum(row.num_examples for row in record.workers)
            pace = f"{examples / record.round_seconds:,.0f} samples/s  {', '.join(waits)}".rstrip()
        spent, done = time.monotonic() - self._began, self._share_done - self._share_before
        left = "?"
        if done > 0:
            left = str(timedelta(seconds=round(spent * (1 - self._share_done) / done)))
        return "  ".join([*parts, pace, f"{left} left"])
