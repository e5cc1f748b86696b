"""The Python interface: train a task, load a run's model, evaluate it."""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from flwr.serverapp.exception import AggregationError
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from .algorithm.catalog import CUSTOM_PARTS, register_part
from .config import RunConfig, python_names
from .devices.machine import this_machine
from .devices.worker_spec import cores_note
from .errors import UsageError
from .parts import make_local_grid
from .results.folder import MODEL, read_config
from .results.metric import Metric
from .results.progress import OnEpochEnd, OnRoundEnd, ProgressView
from .run import train_on
from .settings import Settings
from .strategy.budget import Budget
from .tasks import GIVEN_IN_PYTHON, TASKS
from .tasks.by_name import load_saved_model, load_task, registration
from .tasks.task import Task, restored_generator
from .worker.batches import tensor_parts
from .worker.model_io import first_difference, sent_tensors
from .worker.step import use_precision

_NOT_SAVED = "the run's task was given as an object, which is not saved; pass it again: "


@dataclass(frozen=True)
class TrainResult:
    """Result of `train`.

    Parameters
    ----------
    model : torch.nn.Module
        The trained model, on the CPU, in eval mode.
    accuracy : float or None
        Accuracy in the last evaluation, in [0, 1]; None if the metric is not an accuracy.
    loss : float or None
        Mean test loss in the last evaluation.
    folder : Path
        Results folder with metrics, plots and model.
    summary : dict
        Content of ``summary.json``.
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
    **settings: Unpack[Settings],
) -> TrainResult:
    """Train on the devices of this machine.

    Works in notebooks, and in scripts without ``if __name__ == "__main__"``, because workers do not
    import the script. They get its definitions by value, large tensors in shared memory, and
    the values of the variables of imported modules of your own.

    Parameters
    ----------
    task : Task or str (default: "")
        Data, model, loss and metric; or the name of a task, or ``module:function``. Empty: the task
        of the resumed run, else "digits".
    workers : str (default: "")
        Devices, such as ``"1x cuda:0 fast; 2x cpu slow"``. Empty: those of the resumed run, else
        "auto".
    resume : str or Path (default: "")
        Folder of a run to continue, such as ``"runs/latest"``. The run keeps its settings, except
        those that are given here; docs/reference/settings.md lists the ones that may change.
    on_round_end : callable, optional
        Called with a `RoundRecord` after every round. Workers wait until it returns. An exception
        in it ends the run.
    on_epoch_end : callable, optional
        Called in the same way with an `EpochRow` after every epoch and its evaluation, and again
        when the result of an async evaluation arrives.
    quiet : bool (default: False)
        Print nothing.
    **settings
        Any other setting in docs/reference/settings.md, in snake_case: ``epochs=100``,
        ``batch_size=32``, ``learning_rate=0.1``, ``out="my-run"``. ``steps``, ``sampler``,
        ``weights`` and ``selection`` also accept an object.

    Returns
    -------
    TrainResult
        The model, its accuracy and loss, and the results folder.

    Raises
    ------
    UsageError
        If a setting, the task or a worker is invalid: one line that names the argument. Nothing
        has been started or written.
    AggregationError
        If no worker succeeded in three rounds in a row, or too few workers remain for another
        epoch. The results so far are in the folder.

    Examples
    --------
    >>> import flower_blsgd
    >>> result = flower_blsgd.train(
    ...     "digits", workers="2x cpu fast; 1x cpu slow", epochs=20
    ... )  # doctest: +SKIP
    """
    resume = os.path.expanduser(resume)
    before = read_config(Path(resume)).to_run_config() if resume else {}
    if task == "" and (task := str(before.get("task", "digits"))) == GIVEN_IN_PYTHON:
        raise UsageError(_NOT_SAVED + "train(task, resume=...)")
    given = task if isinstance(task, Task) else None
    if given is None and not isinstance(task, str):
        raise UsageError(f"task = {task!r} must be a Task or a string")
    name = task if isinstance(task, str) else GIVEN_IN_PYTHON
    values: dict[str, Any] = {"workers": "auto", **before, "task": name, "resume": resume}
    given_settings: dict[str, Any] = {**settings}
    for key, value in given_settings.items():
        is_part = key in CUSTOM_PARTS and not isinstance(value, str)
        given_value = register_part(key, value) if is_part else value
        is_path = isinstance(value, os.PathLike)
        values[key.replace("_", "-")] = os.fspath(value) if is_path else given_value
    if workers:
        values["workers"] = workers
    if given is not None and not resume:
        values.setdefault("name", "train")
    try:
        return _train(RunConfig.from_run_config(values), given, quiet, on_round_end, on_epoch_end)
    except (UsageError, AggregationError) as error:
        error.args = (python_names(str(error), *settings),)
        raise


def _train(
    config: RunConfig,
    task: Task | None,
    quiet: bool,
    on_round_end: OnRoundEnd | None,
    on_epoch_end: OnEpochEnd | None,
) -> TrainResult:
    if task is not None and not task.data_fingerprint and tensor_parts(task.train):
        # Hashing takes seconds, and the workers get these very arrays.
        task = replace(task, data_fingerprint=GIVEN_IN_PYTHON)
    # Registered in the worker processes only: other threads here may train other tasks.
    setup = registration(config.task if task is None else task)
    grid = make_local_grid(config, setup)
    view = ProgressView(
        Budget.of_run(config),
        Console(quiet=True) if quiet else None,
        on_round_end=on_round_end,
        on_epoch_end=on_epoch_end,
    )
    if note := cores_note(grid.workers):
        view.say(note)
    with grid, _quiet_flower():
        report = train_on(grid, config, view, task)
    return TrainResult(
        model=load(report.folder.path, task=task),
        accuracy=report.summary["accuracy"],
        loss=report.summary["loss"],
        folder=report.folder.path,
        summary=report.summary,
    )


@contextlib.contextmanager
def _quiet_flower() -> Iterator[None]:
    """Limit Flower's log to warnings, because it logs several lines per round."""
    logger = logging.getLogger("flwr")

    def is_warning(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    logger.addFilter(is_warning)  # not the level: runs in other threads may overlap
    try:
        yield
    finally:
        logger.removeFilter(is_warning)


@dataclass(frozen=True)
class Evaluation:
    """Accuracy and loss of a saved model on a test set.

    Parameters
    ----------
    accuracy : float or None
        Accuracy in [0, 1]; None if the metric is another one.
    metric : float
        Value of the metric.
    loss : float
        Mean over the samples.
    metric_name : str
        Name of the metric, such as ``"accuracy"``.
    num_examples : int
        Number of test samples.
    device : str
        Device that computed the evaluation.
    split : {"test", "validation"} (default: "test")
        ``"validation"`` if the data have no test set.
    """

    accuracy: float | None
    metric: float
    loss: float
    metric_name: str
    num_examples: int
    device: str
    split: str = "test"


def load(run: str | Path, task: Task | None = None, *, data: str = "") -> nn.Module:
    """Return the model of a run, on the CPU, in eval mode.

    No data are needed, unless the run's task is a custom one (``module:function``).

    Parameters
    ----------
    run : str or Path
        Folder of the run, such as ``"runs/latest"``.
    task : Task, optional
        Required if the run's task was given to `train` as an object; it creates the model.
    data : str (default: "")
        Data folder, for a task that needs it; empty: the one that the run used.

    Raises
    ------
    UsageError
        If the folder contains no run, the saved model does not fit the task, or both `task` and
        `data` are given.
    """
    folder = Path(os.path.expanduser(run))
    config = read_config(folder)
    tensors = _tensors(folder)
    with restored_generator():
        if task is None and config.task in TASKS:
            model = load_saved_model(config.task, config.model, tensors, config.dropout)
        else:
            model = _load_task(config, task, data).replica(config.seed)
    own = sent_tensors(model)
    if different := first_difference(tensors, own):
        raise UsageError(f"{folder}: the saved model does not fit its task: {different}")
    for name, tensor in own.items():
        tensor.detach().copy_(tensors[name])
    return model.eval()


def evaluate_run(
    run: str | Path, task: Task | None = None, *, data: str = "", device: str = ""
) -> Evaluation:
    """Evaluate a run's model on the whole test set.

    The test set is also used if the run had a validation set. Choose settings on the validation
    set, and evaluate the chosen model once with this function. If the data have no test set, the
    validation set of the run is used.

    Parameters
    ----------
    run : str or Path
        Folder of the run.
    task : Task, optional
        As for `load`.
    data : str (default: "")
        Data folder; empty: the one that the run used.
    device : str (default: "")
        Device to compute on; empty: the first accelerator, else the CPU.

    Raises
    ------
    UsageError
        If the folder contains no run, the data are not available or do not fit the model, the
        device does not exist, or both `task` and `data` are given.
    """
    folder = Path(os.path.expanduser(run))
    config = read_config(folder)
    machine = this_machine()
    devices = [*machine.usable_accelerators, "cpu"]
    device = device or devices[0]
    if device != "cpu" and not machine.has_accelerator(device):
        raise UsageError(f"device = {device!r} not found; this machine has {', '.join(devices)}")
    given = task
    task = _load_task(config, task, data)
    # `load` creates a benchmark's model without these data, which may have other classes.
    model = load(folder, given if config.task in TASKS else task)
    _check_assets(folder, task, data)
    if given is None and task.prepared is not None:
        outputs = model(torch.from_numpy(task.prepared.test[0][:1])).shape[1]
        if task.prepared.num_classes not in (0, outputs):
            raise UsageError(
                f"data = {data or config.data!r} has {task.prepared.num_classes} classes, but the "
                f"model of {folder} has {outputs}; evaluate with the classes of the run"
            )
    use_precision(config.precision, device)
    report = task.evaluate(model, device, 0, task.num_test, **config.evaluation_settings)
    figure, name = task.figure(report), task.metric_name
    accuracy = Metric(name).columns(figure)["accuracy"]
    has_test = task.prepared is None or task.prepared.has_test
    split = "test" if has_test else "validation"
    return Evaluation(accuracy, figure, report.loss, name, task.num_test, device, split)


def _tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / MODEL
    if not file.is_file():
        raise UsageError(f"{folder} contains no model: the run ended before its first epoch")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None


def _load_task(config: RunConfig, task: Task | None, data: str) -> Task:
    """Return the given task, or load the one of the settings."""
    if task is not None and data:
        raise UsageError(f"data = {data!r}: the given task has its own data; leave one of them out")
    if task is not None:
        return task
    if config.task == GIVEN_IN_PYTHON:
        raise UsageError(_NOT_SAVED + "load(run, task=...)")
    if config.is_script:
        raise UsageError(
            f"the run trained the model of {config.task}; load its model.safetensors into that "
            "model with model.load_state_dict(load_file(...), strict=False)"
        )
    settings = {**config.task_settings, "data": data or config.data}
    return load_task(**settings, prefer_test=True)


def _check_assets(folder: Path, task: Task, data: str) -> None:
    """Reject data made with other assets than the model's, such as another tokenizer."""
    for name, path in task.assets.items():
        saved = folder / name
        if saved.is_file() and saved.read_bytes() != path.read_bytes():
            raise UsageError(
                f"{f'data = {data!r}' if data else folder}: the {name} built from these data "
                f"differs from {saved}; evaluate with the data of the run"
            )
