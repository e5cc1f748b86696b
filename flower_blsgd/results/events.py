"""Write the numbers of a run as TensorBoard events, with ``tensorboard = true``."""

import importlib
from pathlib import Path
from typing import Any

from ..errors import UsageError, pip_install
from ..strategy.round_metrics import RoundRecord
from .folder import EpochRow, scalars
from .run_log import RunLog


def require_tensorboard() -> None:
    """Raise UsageError if the package of TensorBoard is not installed."""
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise UsageError(f"tensorboard = true: {error}; {pip_install('tensorboard')}") from None


class EventWriter:
    """Writes rounds and epochs to ``tensorboard/`` in the results folder; their step is the round.

    `last_round` is that of a resumed run, which hides later events, or 0.
    """

    def __init__(self, folder: Path, last_round: int, log: RunLog) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = last_round + 1 if last_round else None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
        self._log = log

    def add_round(self, record: RoundRecord) -> None:
        """Write the numbers of a line of ``rounds.jsonl``."""
        self._log.attempt("tensorboard", self._add, "round", record, record.round)
        for row in record.workers:
            self._log.attempt("tensorboard", self._add, row.label, row, record.round)

    def add_epoch(self, row: EpochRow) -> None:
        """Write the numbers of a line of ``epochs.csv``."""
        self._log.attempt("tensorboard", self._add, "epoch", row, row.rounds)

    def _add(self, group: str, record: Any, step: int) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """Close the file."""
        self._log.attempt("tensorboard", self._writer.close)
