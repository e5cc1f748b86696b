"""Live progress in a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..round_log import RoundRecord
from .accounts import Accounts
from .folder import EpochRow


class ProgressView:
    """Tells how a run goes: epoch, round, accuracy, speed, who waits for whom, time left.

    In a terminal a line that is rewritten after every round stands below one line per epoch;
    elsewhere only the lines per epoch are written.

    Parameters
    ----------
    epochs : int
        How many there will be.
    console : rich.console.Console, optional
        Where to write; standard output by default.
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
        self._samples_per_second = 0.0
        self._waiting = ""
        self._accuracy = ""

    def say(self, line: str) -> None:
        """Write a line that stays."""
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

    def round(self, record: RoundRecord, accounts: Accounts) -> None:
        """Tell a round."""
        examples = sum(row.num_examples for row in record.workers)
        self._samples_per_second = examples / record.round_seconds
        self._waiting = accounts.recent(record)
        if not self._share_done:  # the workers' start says nothing of the time that is left
            self._began = time.monotonic() - record.round_seconds
        in_epoch = record.round_in_epoch / record.rounds_in_epoch
        by_epochs = (record.epoch - 1 + in_epoch) / self._epochs
        by_seconds = accounts.budget_seconds / self._seconds if self._seconds else 0.0
        self._share_done = min(1.0, max(by_epochs, by_seconds))
        if self._live is not None:
            parts = [
                f"epoch {record.epoch}{self._of_epochs}",
                f"round {record.round_in_epoch}/{record.rounds_in_epoch}",
                self._accuracy,
                f"{self._samples_per_second:,.0f} samples/s",
                self._waiting,
                f"{self._time_left()} left",
            ]
            text = "  ".join(escape(part) for part in parts if part)
            self._live.update(self._bar, completed=self._share_done, description=text)

    def epoch(self, row: EpochRow) -> None:
        """Tell the end of an epoch."""
        width = len(str(self._epochs)) if self._of_epochs else 3
        self._accuracy = "" if row.accuracy is None else f"accuracy {row.accuracy:.2%}"
        parts = [
            f"epoch {row.epoch:{width}}{self._of_epochs}",
            self._accuracy,
            f"train loss {row.train_loss:.4f}",
            f"{self._samples_per_second:,.0f} samples/s",
            self._waiting,
            f"{self._time_left()} left",
        ]
        self.say("  ".join(part for part in parts if part))

    def end(self) -> None:
        """Take the live line away. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

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
