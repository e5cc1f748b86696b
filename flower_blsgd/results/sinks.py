"""Where the rounds and epochs of a run go, as soon as each has ended.

`ProgressView` (`progress.py`) and `EventWriter` (`events.py`) are other sinks.
"""

from collections.abc import Iterable, Sequence

from ..strategy.cost_model import NEGLIGIBLE
from ..strategy.round_metrics import RoundRecord, WorkerRound
from ..strategy.workers import Worker
from .folder import EpochRow, RunFolder
from .history import RunHistory
from .run_log import RunLog
from .tables import counted
from .waiting import waiting_note


class Sink:
    """A place for rounds and epochs. The lines that its methods return are said."""

    def add_round(self, record: RoundRecord, history: RunHistory) -> Iterable[str]:
        """Take a round, which the history already contains."""
        return ()

    def add_epoch(self, row: EpochRow, history: RunHistory) -> Iterable[str]:
        """Take an epoch, or the same one again with its late result."""
        return ()

    def close(self) -> None:
        """End, before the summary is written; may be called twice."""


class FileSink(Sink):
    """Writes ``rounds.jsonl`` and ``epochs.csv``."""

    def __init__(self, folder: RunFolder, log: RunLog) -> None:
        self._folder, self._log = folder, log

    def add_round(self, record: RoundRecord, history: RunHistory) -> Iterable[str]:
        """Append a line."""
        self._log.attempt("rounds.jsonl", self._folder.add_round, record)
        return ()

    def add_epoch(self, row: EpochRow, history: RunHistory) -> Iterable[str]:
        """Append a line, or change that of a late result."""
        if row.late:
            self._log.attempt("epochs.csv", self._folder.write_epochs, history.rows)
        else:
            self._log.attempt("epochs.csv", self._folder.add_epoch, row)
        return ()


class Notes(Sink):
    """Names the local steps of the workers, and the setting that makes fast ones wait.

    `workers` are those of the run, by index.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._steps: dict[int, int] = {}

    def add_round(self, record: RoundRecord, history: RunHistory) -> Iterable[str]:
        """Name the steps of every worker in its first round, and when they change.

        Rounds that measure speeds do not count.
        """
        if history.measuring == len(history.metrics.records):
            return
        for row in record.workers:
            before = self._steps.get(row.worker)
            self._steps[row.worker] = row.local_steps
            if before is None:
                yield f"  {row.label}: {self._first(row, history)}"
            elif before != row.local_steps:
                why = " or the number of samples" if history.config.selection else ""
                yield (
                    f"  epoch {record.epoch}: {row.label} does {counted(row.local_steps, 'step')} "
                    f"per round instead of {before}, since its speed{why} changed"
                )

    def _first(self, row: WorkerRound, history: RunHistory) -> str:
        if not row.trained:
            return "sums its slice of the fast workers' models"
        own = self._workers[row.worker].profile
        steps = counted(row.local_steps, "step")
        steps += f" of {own.batch_size} samples" if own.batch_size else ""
        steps += " per round"
        if own.precision and not history.config.is_script:
            steps += f" in {own.precision}"
        steps += f", weight {row.weight:.1%}"
        if 0 < row.weight < NEGLIGIBLE:
            steps += f" (contributes less than {NEGLIGIBLE:.0%})"
        return steps

    def add_epoch(self, row: EpochRow, history: RunHistory) -> Iterable[str]:
        """Name the setting after the first epoch in which the processes are warm."""
        rounds_before = history.rows[-2].rounds if len(history.rows) > 1 else 0
        if row is history.rows[-1] and not row.late and rounds_before < 2 <= row.rounds:
            # Processes warm up in the first round, or in those that measure.
            rounds = history.metrics.rounds_on_clock(max(1, history.measuring))
            if note := waiting_note(history.config, self._workers, rounds):
                yield note
