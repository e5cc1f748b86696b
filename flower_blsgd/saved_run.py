"""Take up what a run left: its model, and its accuracy on the test set."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from .config import RunConfig
from .errors import UsageError
from .runtime.machine import this_machine
from .tasks import (
    GIVEN_IN_PYTHON,
    MODELS,
    SAVED_MODELS,
    Task,
    load_model,
    load_saved_model,
    load_task,
)
from .worker.evaluation import evaluate
from .worker.precision import use_precision


@dataclass(frozen=True)
class Evaluation:
    """A saved model on a test set.

    Parameters
    ----------
    accuracy, loss : float
        Means over the samples.
    num_examples : int
        How many samples.
    device : str
        Where it was computed.
    """

    accuracy: float
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
    _refuse_both(task, data)
    folder = Path(run)
    config = read_config(folder)
    tensors = _tensors(folder)
    model = _fresh_model(config, task, data, tensors)
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

    Also where the run itself was measured on a validation share: that chooses settings, and
    this, once, tells how good the choice is.

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
    _refuse_both(task, data)
    folder = Path(run)
    config = read_config(folder)
    if device:
        kind, _, number = device.partition(":")
        if kind != "cpu" or number:
            try:
                this_machine().check_accelerator(device)
            except UsageError as error:
                reason = str(error).removeprefix("workers: ")
                raise UsageError(f"device = {device!r}: {reason}") from None
    else:
        device = next(iter(this_machine().accelerators), "cpu")
    if task is None and not _made_without_data(config):
        task = _own_task(config, data)  # once, and only from where its data is now
    model = load(folder, task)
    if task is None:
        task = _own_task(config, data)
    _check_assets(folder, task, data)
    use_precision(config.precision, device)
    size = task.evaluation_batch_size
    loss, accuracy = evaluate(model, task.test, task.loss, task.metric, device, batch_size=size)
    return Evaluation(accuracy, loss, task.num_test, device)


def read_config(folder: Path) -> RunConfig:
    """Return the settings of a run.

    Raises
    ------
    UsageError
        If the folder holds none, or they cannot be read.
    """
    file = folder / "config.toml"
    if not file.is_file():
        raise UsageError(f"{folder} is no run: it has no config.toml; name a folder under runs/")
    try:
        return RunConfig.from_run_config(tomllib.loads(file.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}") from None
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None


def _tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / "model.safetensors"
    if not file.is_file():
        raise UsageError(f"{folder} holds no model: the run ended before its first epoch did")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None


def _refuse_both(task: Task | None, data: str) -> None:
    if task is not None and data:
        raise UsageError(f"data = {data!r}: the task given brings its own; leave one of them out")


def _made_without_data(config: RunConfig) -> bool:
    return config.task in MODELS or config.task in SAVED_MODELS


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


def _fresh_model(
    config: RunConfig, task: Task | None, data: str, tensors: dict[str, Tensor]
) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers are not ours to draw
        if task is None and not _made_without_data(config):
            task = _own_task(config, data)
        if task is not None:
            return task.model()
        if config.task in SAVED_MODELS:
            return load_saved_model(config.task, config.model, tensors, config.dropout)
        return load_model(config.task, config.model, _num_classes(config, tensors))


def _num_classes(config: RunConfig, tensors: dict[str, Tensor]) -> int:
    """Return for how many classes the model is, by what differs between two such models."""
    try:
        with torch.device("meta"):  # nothing is computed, and no memory used
            two, three = (
                load_model(config.task, config.model, classes).state_dict() for classes in (2, 3)
            )
    except UsageError:  # a model for one number only, or none at all
        rows = [len(tensor) for tensor in tensors.values() if tensor.ndim == 2]
        return min(rows, default=10)
    for name in two.keys() & tensors.keys():
        sizes = zip(two[name].shape, three[name].shape, tensors[name].shape, strict=False)
        for few, more, ours in sizes:
            if few != more:
                return ours
    return 10


def _own_task(config: RunConfig, data: str = "") -> Task:
    if config.task == GIVEN_IN_PYTHON:
        raise UsageError(
            "the run's task was given as an object, which is not saved; pass it along: "
            "load(run, task=...)"
        )
    return load_task(config.task, data or config.data, config.model, **config.task_options)
