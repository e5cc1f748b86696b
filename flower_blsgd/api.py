"""The Python interface: train a task, load a run's model, evaluate it."""

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from .config import RunConfig
from .errors import UsageError
from .grids.devices import cores_note, this_machine
from .results.folder import MODEL, EpochRow, read_config
from .results.metrics import RunMetrics
from .results.progress import ProgressView
from .run import make_local_grid, train_on
from .strategy.round_metrics import RoundRecord
from .tasks import GIVEN_IN_PYTHON, TASKS
from .tasks.task import Task, load_saved_model, load_task, register_task
from .worker.step import use_precision

_NOT_SAVED = "the run's task was given as an object, which is not saved; pass it along: "

OnRoundEnd = Callable[[RoundRecord], object]
OnEpochEnd = Callable[[EpochRow], object]


@dataclass(frozen=True)
class TrainResult:
    """The result of `train`.

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
    task: Task | str = "",
    *,
    workers: str = "",
    resume: str | Path = "",
    on_round_end: OnRoundEnd | None = None,
    on_epoch_end: OnEpochEnd | None = None,
    quiet: bool = False,
    **settings: bool | int | float | str | os.PathLike[str],
) -> TrainResult:
    """Train on all devices of this machine.

    It works in a notebook, and in a script without ``if __name__ == "__main__"``: the workers do
    not import the script. What it defines travels to them by value, large tensors as shared
    memory, once for all of them.

    Parameters
    ----------
    task : Task or str (default: "")
        Data, model, loss and metric; or a task's name, or ``module:function``. Empty for that of
        the run that is resumed, else "digits".
    workers : str (default: "")
        Such as ``"1x cuda:0 fast; 2x cpu slow"``. Empty for those of the run that is resumed,
        else "auto".
    resume : str or Path (default: "")
        The folder of a run that ended early, such as ``"runs/latest"``: it goes on there, with
        its own settings but for those that are given here and may change.
    on_round_end : callable, optional
        Called with a `RoundRecord` after every round, for loggers; the workers wait meanwhile.
        What it raises ends the run.
    on_epoch_end : callable, optional
        Called likewise with an `EpochRow` after every epoch and its evaluation; after an async
        evaluation once more, when the result arrived.
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
    of_run = read_config(Path(resume)).to_run_config() if resume else {}
    if task == "" and (task := str(of_run.get("task", "digits"))) == GIVEN_IN_PYTHON:
        raise UsageError(_NOT_SAVED + "train(task, resume=...)")
    given = task if isinstance(task, Task) else None
    if given is None and not isinstance(task, str):
        raise UsageError(f"task = {task!r} must be a Task or a text")
    name = task if isinstance(task, str) else GIVEN_IN_PYTHON
    values = {"workers": "auto", **of_run, "task": name, "resume": str(resume)}
    values |= {
        key.replace("_", "-"): os.fspath(value) if isinstance(value, os.PathLike) else value
        for key, value in settings.items()
    }
    if workers:
        values["workers"] = workers
    if given is not None and not resume:
        values.setdefault("name", "train")
    config = RunConfig.from_run_config(values)
    # In their processes only: threads of this one may train other tasks meanwhile.
    setup = None if given is None else functools.partial(register_task, given)
    grid = make_local_grid(config, setup)
    view = _CallingView(config, quiet, on_round_end, on_epoch_end)
    if note := cores_note(grid.workers):
        view.say(note)
    with grid, _quiet_flower():
        report = train_on(grid, config, view, given)
    return TrainResult(
        model=load(report.folder.path, task=given),
        accuracy=report.summary["accuracy"],
        loss=report.summary["loss"],
        folder=report.folder.path,
        summary=report.summary,
    )


class _CallingView(ProgressView):
    """A progress view that calls the user's callbacks as well."""

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

    def round(self, record: RoundRecord, metrics: RunMetrics) -> None:
        """Show a round, and call back."""
        super().round(record, metrics)
        if self._on_round_end is not None:
            self._on_round_end(record)

    def epoch(self, row: EpochRow) -> None:
        """Show the end of an epoch, and call back."""
        super().epoch(row)
        if self._on_epoch_end is not None:
            self._on_epoch_end(row)


@contextlib.contextmanager
def _quiet_flower() -> Iterator[None]:
    """Silence Flower's log but for warnings: it logs several lines per round."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


@dataclass(frozen=True)
class Evaluation:
    """Accuracy and loss of a saved model on a test set.

    Parameters
    ----------
    accuracy : float or None
        Mean of the metric over the samples; None if one of its values is outside [0, 1].
    metric, loss : float
        Means over the samples.
    num_examples : int
        How many samples.
    device : str
        Where it was computed.
    """

    accuracy: float | None
    metric: float
    loss: float
    num_examples: int
    device: str


def load(run: str | Path, task: Task | None = None, *, data: str = "") -> nn.Module:
    """Return the model of a run, on the CPU, in eval mode.

    The data is not needed, unless the task is one of your own, named by ``module:function``.

    Parameters
    ----------
    run : str or Path
        The run's folder, such as ``"runs/latest"``.
    task : Task, optional
        Needed if the run's task was given to `train` as an object: it makes the model.
    data : str (default: "")
        Where the data is, for a task that needs it; empty for where the run had it.

    Raises
    ------
    UsageError
        If the folder holds no run, its model is not that of the task, or both task and data are
        given.
    """
    folder = Path(run)
    config = read_config(folder)
    tensors = _tensors(folder)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers are not ours to draw
        if task is None and config.task in TASKS:
            model = load_saved_model(config.task, config.model, tensors, config.dropout)
        else:
            model = _load_task(config, task, data).model()
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UsageError(f"{folder}: the saved model is not that of its task: {reason}") from None
    return model.eval()


def evaluate_run(
    run: str | Path, task: Task | None = None, *, data: str = "", device: str = ""
) -> Evaluation:
    """Return accuracy and loss of a run's model on the whole test set.

    Also where the run itself was measured on a validation share: choose settings by that one, and
    measure the choice by this, once.

    Parameters
    ----------
    run : str or Path
        The run's folder.
    task : Task, optional
        As for `load`.
    data : str (default: "")
        Where the data is; empty for where the run had it.
    device : str (default: "")
        Where to compute; empty for the first accelerator, else the CPU.

    Raises
    ------
    UsageError
        If the folder holds no run, the data cannot be had or is not made for the model, or both
        task and data are given.
    """
    folder = Path(run)
    config = read_config(folder)
    machine = this_machine()
    devices = [*machine.accelerators, "cpu"]
    device = device or devices[0]
    if device != "cpu" and not machine.has_accelerator(device):
        raise UsageError(f"device = {device!r} is not there; this machine has {', '.join(devices)}")
    given = task
    task = _load_task(config, task, data)
    # That of a benchmark is made without its data, which may have other classes.
    model = load(folder, given if config.task in TASKS else task)
    _check_assets(folder, task, data)
    use_precision(config.precision, device)
    report = task.evaluate(model, device, 0, task.num_test, config.evaluation_batch_size)
    file = folder / "summary.json"  # the metric may have left [0, 1] in the run
    in_run = json.loads(file.read_text()).get("metric") if file.is_file() else None
    accuracy = report.metric if report.metric_in_range and in_run is None else None
    return Evaluation(accuracy, report.metric, report.loss, task.num_test, device)


def _tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / MODEL
    if not file.is_file():
        raise UsageError(f"{folder} holds no model: the run ended before its first epoch did")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None


def _load_task(config: RunConfig, task: Task | None, data: str) -> Task:
    """Return the task given, else that of the settings, with its data."""
    if task is not None and data:
        raise UsageError(f"data = {data!r}: the task given brings its own; leave one of them out")
    if task is not None:
        return task
    if config.task == GIVEN_IN_PYTHON:
        raise UsageError(_NOT_SAVED + "load(run, task=...)")
    return load_task(config.task, data or config.data, config.model, **config.task_options)


def _check_assets(folder: Path, task: Task, data: str) -> None:
    """Refuse data that were made with other files than the model's, such as its tokenizer."""
    for name, path in task.assets.items():
        saved = folder / name
        if saved.is_file() and saved.read_bytes() != path.read_bytes():
            raise UsageError(
                f"{f'data = {data!r}' if data else folder}: its {name} is made of these data and "
                f"differs from {saved}, so the model would read something else in it; evaluate "
                "with the data of the run"
            )
