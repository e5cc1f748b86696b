"""Show a run's progress: a live line in a terminal, a line per epoch elsewhere."""

import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..strategy.round_metrics import RoundRecord
from .folder import EpochRow
from .metrics import RoundTimes, RunMetrics


class ProgressView:
    """Shows epoch, round, accuracy, samples per second, waiting shares and the time left.

    In a terminal a line that is rewritten after every round stands below one line per epoch;
    elsewhere only the lines per epoch are printed.

    Parameters
    ----------
    epochs : int
        How many there will be.
    console : rich.console.Console, optional
        Standard output by default.
    seconds : float (default: 0)
        The budget in seconds, if that is what ends the run; 0 for none.
    """

    def __init__(self, epochs: int, console: Console | None = None, seconds: float = 0.0) -> None:
        self._epochs = epochs
        self._seconds = seconds
        self._console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self._live: Progress | None = None
        self._bar = TaskID(0)
        self._began = time.monotonic()
        self._share_done = 0.0
        self._pace = ""
        self._accuracy = ""

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(escape(line), emoji=False)

    def begin(self) -> None:
        """Start the clock of the time left, and the live line."""
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._live = Progress(
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
                refresh_per_second=8,
            )
            self._live.start()
            self._bar = self._live.add_task("starting the workers", total=1.0)

    def round(self, record: RoundRecord, metrics: RunMetrics) -> None:
        """Show a round that is over, of which `metrics` has the times already."""
        examples = sum(row.num_examples for row in record.workers)
        waiting = waiting_text(record, metrics.last_times)
        self._pace = "  ".join(
            filter(None, [f"{examples / record.round_seconds:,.0f} samples/s", waiting])
        )
        if not self._share_done:  # the workers' start says nothing of the time that is left
            self._began = time.monotonic() - record.round_seconds
        in_epoch = record.round_in_epoch / record.rounds_in_epoch
        by_epochs = (record.epoch - 1 + in_epoch) / self._epochs
        by_seconds = metrics.budget_seconds / self._seconds if self._seconds else 0.0
        self._share_done = min(1.0, max(by_epochs, by_seconds))
        if self._live is not None:
            at = f"round {record.round_in_epoch}/{record.rounds_in_epoch}"
            text = self._line(f"epoch {record.epoch}{self._of_epochs}", at, self._accuracy)
            self._live.update(self._bar, completed=self._share_done, description=escape(text))

    def epoch(self, row: EpochRow) -> None:
        """Print the line of an epoch that is over."""
        width = len(str(self._epochs)) if self._of_epochs else 3
        self._accuracy = "" if row.accuracy is None else f"accuracy {row.accuracy:.2%}"
        number = f"epoch {row.epoch:{width}}{self._of_epochs}"
        self.say(self._line(number, self._accuracy, f"train loss {row.train_loss:.4f}"))

    def end(self) -> None:
        """Remove the live line; may be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, *parts: str) -> str:
        return "  ".join(filter(None, [*parts, self._pace, f"{self._time_left()} left"]))

    @property
    def _of_epochs(self) -> str:
        return "" if self._seconds else f"/{self._epochs}"

    def _time_left(self) -> str:
        if not self._share_done:
            return "?"
        spent = time.monotonic() - self._began
        seconds = round(spent * (1 - self._share_done) / self._share_done)
        hours, rest = divmod(max(0, seconds), 3600)
        clock = f"{rest // 60}:{rest % 60:02}"
        return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else clock


def waiting_text(record: RoundRecord, times: RoundTimes | None) -> str:
    """Return each tier's waiting share in a round, in words; empty if the times are not known."""
    if times is None:
        return ""
    parts = []
    for name, fast in (("fast", True), ("slow", False)):
        waiting = [
            times.waiting_seconds[row.worker]
            for row in record.workers
            if row.trained and row.fast is fast
        ]
        if waiting:
            parts.append(f"{name} waits {sum(waiting) / len(waiting) / times.round_seconds:.0%}")
    return ", ".join(parts)
