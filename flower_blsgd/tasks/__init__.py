"""The training tasks by name; a user's own by ``module:function`` or as an object.

Importing this imports no torch: data can be prepared without.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .task import Task

TASKS: Mapping[str, str] = {
    "digits": "flower_blsgd.tasks.digits:digits",
    "cifar10": "flower_blsgd.tasks.cifar10:cifar10",
    "cifar100": "flower_blsgd.tasks.cifar100:cifar100",
    "flowers102": "flower_blsgd.tasks.flowers102:flowers102",
    "tiny-imagenet": "flower_blsgd.tasks.tiny_imagenet:tiny_imagenet",
    "ag-news": "flower_blsgd.tasks.ag_news:ag_news",
}
"""Where each task is made: a function ``(data, model) -> Task`` of two texts."""

MODELS: Mapping[str, str] = {
    "digits": "flower_blsgd.tasks.digits:model",
    "cifar10": "flower_blsgd.tasks.cifar10:model",
    "cifar100": "flower_blsgd.tasks.cifar100:model",
    "flowers102": "flower_blsgd.tasks.flowers102:model",
    "tiny-imagenet": "flower_blsgd.tasks.tiny_imagenet:model",
}
"""Where each task's models are made: a function ``(name, num_classes) -> Module``."""

SAVED_MODELS: Mapping[str, str] = {"ag-news": "flower_blsgd.tasks.ag_news:saved_model"}
"""Where models are made that follow from the data, for weights that a run has saved.

Each is a function ``(name, tensors, dropout) -> Module``.
"""

GIVEN_IN_PYTHON = "given-in-python"
"""The name of a task that was given as an object."""

_GIVEN: dict[str, "Task"] = {}
"""Tasks that this process was given as objects."""

OPTIONS: Mapping[str, Any] = {
    "skip_bad": False,
    "split": "",
    "max_samples": 0,
    "max_tokens": 128,
    "pretrained": True,
    "dropout": "auto",
}
"""Settings that a task may know besides data and model, and what each is where nobody sets it.

A task knows one if its function has a parameter of that name; one that is set and that it does
not know is refused.
"""

__all__ = [
    "GIVEN_IN_PYTHON",
    "MODELS",
    "OPTIONS",
    "SAVED_MODELS",
    "TASKS",
    "Task",
    "given_task",
    "load_model",
    "load_saved_model",
    "load_task",
    "register_task",
]


def __getattr__(name: str) -> Any:
    """Load `Task` when it is first used."""
    if name != "Task":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .task import Task

    return Task


def register_task(task: "Task", name: str = GIVEN_IN_PYTHON) -> str:
    """Let `load_task` find a task under a name, in this process, and return the name.

    A task that had the name before is replaced.
    """
    _GIVEN[name] = task
    return name


def given_task(name: str) -> "Task | None":
    """Return the task that this process was given as an object under a name, if it was."""
    return _GIVEN.get(name)


def load_task(
    name: str,
    data: str = "",
    model: str = "",
    *,
    validation_share: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> "Task":
    """Return a task by name.

    Parameters
    ----------
    name : str
        A registered name, one in `TASKS`, or ``module:function``.
    data, model : str (default: "")
        Where the data is and which model; empty for the task's own default.
    validation_share : float (default: 0.0)
        Above 0: test on this share of the training data instead of the test data.
    seed : int (default: 0)
        Which samples that share consists of.
    **options
        Of `OPTIONS`; those that the task does not know must be what they are by default.

    Returns
    -------
    Task
        Data and model maker.

    Raises
    ------
    UsageError
        If there is no such task, or it refuses one of the settings.
    """
    task = _GIVEN.get(name)
    options = {**OPTIONS, **options}
    if task is None:
        task = _made(name, data, model, options)
    else:
        refuse_set(name, {"data": data, "model": model, **options})
    if validation_share == 0:
        return task
    from .validation import with_validation

    return with_validation(task, validation_share, seed)


def load_model(task: str, model: str = "", num_classes: int = 10) -> "nn.Module":
    """Return a fresh model of a task; for the tasks of `TASKS` without its data.

    Parameters
    ----------
    task : str
        A task's name.
    model : str (default: "")
        Which model; empty for the task's own default.
    num_classes : int (default: 10)
        For how many classes; a task of one's own knows by itself.

    Raises
    ------
    UsageError
        If there is no such task or model.
    """
    if task in _GIVEN or task not in MODELS:
        return load_task(task, model=model).model()
    made: nn.Module = _function(task, MODELS[task])(model, num_classes)
    return made


def load_saved_model(
    task: str, model: str, tensors: Mapping[str, "Tensor"], dropout: float | str = "auto"
) -> "nn.Module":
    """Return a fresh model for saved weights, of a task of `SAVED_MODELS`; without its data.

    Parameters
    ----------
    task, model : str
        The settings of the run.
    tensors : mapping
        The saved weights; their sizes are read.
    dropout : float or "auto" (default: "auto")
        Of the model.

    Raises
    ------
    UsageError
        If there is no such model.
    """
    made: nn.Module = _function(task, SAVED_MODELS[task])(model, tensors, dropout)
    return made


def _made(name: str, data: str, model: str, options: Mapping[str, Any]) -> "Task":
    from .task import Task

    make = _function(name, TASKS.get(name, name))
    try:
        parameters = list(inspect.signature(make).parameters)
    except (TypeError, ValueError) as error:
        raise UsageError(f"task = {name!r} cannot be loaded: {error}") from None
    known = {key: value for key, value in options.items() if key in parameters}
    refuse_set(name, {key: value for key, value in options.items() if key not in parameters})
    if set(parameters) - set(options):
        task = make(data, model, **known)
    else:
        refuse_set(name, {"data": data, "model": model})
        task = make(**known)
    if not isinstance(task, Task):
        raise UsageError(f"task = {name!r} returned {type(task).__name__}, not a Task")
    return task


def _function(name: str, reference: str) -> Callable[..., Any]:
    module_name, colon, function_name = reference.partition(":")
    if not colon:
        known = [*TASKS, *_GIVEN]
        raise UsageError(
            f"task = {name!r} is not known; {nearest(name, known)}, or module:function"
        )
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        hint = "; put its folder into PYTHONPATH, or install it" if missing else ""
        raise UsageError(f"task = {name!r} cannot be loaded: {error}{hint}") from None
    return function


def refuse_set(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings that the task would not look at."""
    for name_here, value in settings.items():
        if value != OPTIONS.get(name_here, ""):
            key = name_here.replace("_", "-")
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise UsageError(f"{key} = {shown}: task = {name!r} does not take it; leave it out")
