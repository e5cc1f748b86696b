"""Train from Python, without knowing Flower: `train`."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from .config import RunConfig
from .errors import UsageError
from .own_grid import own_grid
from .results.accounts import Accounts
from .results.folder import EpochRow
from .results.progress import ProgressView
from .round_log import RoundRecord
from .run import train_on
from .runtime.devices import sharing_note
from .saved_run import load
from .tasks import Task, register_task

OnRoundEnd = Callable[[RoundRecord], object]
OnEpochEnd = Callable[[EpochRow], object]


@dataclass(frozen=True)
class TrainResult:
    """What `train` returns.

    Parameters
    ----------
    model : torch.nn.Module
        The trained model, on the CPU, in eval mode.
    accuracy, loss : float or None
        Of the last evaluation.
    folder : Path
        Where figures, pictures and model were written.
    summary : dict
        The content of ``summary.json``.
    """

    model: nn.Module
    accuracy: float | None
    loss: float | None
    folder: Path
    summary: dict[str, Any]


def train(
    task: Task | str = "digits",
    *,
    workers: str = "auto",
    on_round_end: OnRoundEnd | None = None,
    on_epoch_end: OnEpochEnd | None = None,
    quiet: bool = False,
    **settings: bool | int | float | str,
) -> TrainResult:
    """Train on all devices of this machine.

    It works in a notebook, and in a script without ``if __name__ == "__main__"``: the workers do
    not import the script. What it defines travels to them by value, large tensors as shared
    memory, once for all of them.

    Parameters
    ----------
    task : Task or str (default: "digits")
        Data, model, loss and metric; or a task's name, or ``module:function``.
    workers : str (default: "auto")
        Such as ``"1x cuda:0 fast; 2x cpu slow"``.
    on_round_end : callable, optional
        Called with a `RoundRecord` after every round, for loggers; the workers wait meanwhile.
        What it raises ends the run.
    on_epoch_end : callable, optional
        Called likewise with an `EpochRow` after every epoch and its evaluation.
    quiet : bool (default: False)
        Print nothing.
    **settings
        Any setting of docs/settings.md, in snake_case: ``epochs=100``, ``batch_size=32``,
        ``learning_rate=0.1``, ``out="my-run"``.

    Returns
    -------
    TrainResult
        The model and what was measured.

    Raises
    ------
    UsageError
        If a setting, the task or a worker cannot be used: one line, before anything starts.
    AggregationError
        If a round had no usable reply. What was reached before is in the folder.

    Examples
    --------
    >>> import flower_blsgd
    >>> result = flower_blsgd.train(
    ...     "digits", workers="2x cpu fast; 1x cpu slow", epochs=20
    ... )  # doctest: +SKIP
    """
    given = task if isinstance(task, Task) else None
    if given is None and not isinstance(task, str):
        raise UsageError(f"task = {task!r} must be a Task or a text")
    name = task if isinstance(task, str) else register_task(task)
    values = {key.replace("_", "-"): value for key, value in settings.items()}
    if given is not None:
        values.setdefault("name", "train")
    config = RunConfig.from_run_config({**values, "task": name, "workers": workers})
    grid = own_grid(
        config, None if given is None else functools.partial(register_task, given, name)
    )
    view = _CallingView(config, quiet, on_round_end, on_epoch_end)
    if note := sharing_note(grid.workers):
        view.say(note)
    with grid, _flower_only_warns():
        report = train_on(grid, config, view)
    return TrainResult(
        model=load(report.folder.path, task=given),
        accuracy=report.summary["accuracy"],
        loss=report.summary["loss"],
        folder=report.folder.path,
        summary=report.summary,
    )


class _CallingView(ProgressView):
    """Tells the callbacks as well."""

    def __init__(
        self,
        config: RunConfig,
        quiet: bool,
        on_round_end: OnRoundEnd | None,
        on_epoch_end: OnEpochEnd | None,
    ) -> None:
        console = Console(quiet=True) if quiet else None
        super().__init__(config.epochs, console, config.seconds)
        self._on_round_end, self._on_epoch_end = on_round_end, on_epoch_end

    def round(self, record: RoundRecord, accounts: Accounts) -> None:
        """Tell a round."""
        super().round(record, accounts)
        if self._on_round_end is not None:
            self._on_round_end(record)

    def epoch(self, row: EpochRow) -> None:
        """Tell the end of an epoch."""
        super().epoch(row)
        if self._on_epoch_end is not None:
            self._on_epoch_end(row)


@contextlib.contextmanager
def _flower_only_warns() -> Iterator[None]:
    """Flower logs several lines per round to the console; the progress view tells enough."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
