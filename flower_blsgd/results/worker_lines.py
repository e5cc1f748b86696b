"""What a run says of its workers: their steps at the start, and when these change."""

from collections.abc import Callable

from ..round_log import RoundRecord
from .summary import HARDLY


class WorkerLines:
    """Says who does how many steps.

    Parameters
    ----------
    say : callable
        Takes a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: dict[int, int] = {}

    def add(self, record: RoundRecord) -> None:
        """Take a round; the first one is told as a whole."""
        if not self._told:
            self._first(record)
        for row in record.workers:
            before = self._told.get(row.worker, row.local_steps)
            if row.local_steps != before:
                self._say(
                    f"  epoch {record.epoch}: {row.label} does {row.local_steps} steps a round "
                    f"instead of {before}: its speed changed"
                )
            self._told[row.worker] = row.local_steps

    def _first(self, record: RoundRecord) -> None:
        for row in record.workers:
            if not row.trained:
                self._say(f"  {row.label}: adds up its slice of the fast workers' models")
                continue
            line = f"  {row.label}: {row.local_steps} steps a round, weight {row.weight:.1%}"
            if 0 < row.weight < HARDLY:
                line += " (hardly takes part)"
            self._say(line)
