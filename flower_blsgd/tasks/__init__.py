"""The training tasks by name; a user's own by ``module:function`` or as an object.

Importing this imports no torch.
"""

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .task import Benchmark, Task

TASKS: Mapping[str, str] = {
    "digits": "digits",
    "cifar10": "images",
    "cifar100": "images",
    "flowers102": "images",
    "tiny-imagenet": "images",
    "ag-news": "ag_news",
}
"""The benchmarks, and the module of this package whose `BENCHMARKS` has each."""

GIVEN_IN_PYTHON = "given-in-python"
"""The name of a task that was given as an object."""

_REGISTERED: dict[str, "Task"] = {}
"""Tasks that were registered in this process, by name."""

OPTIONS: Mapping[str, Any] = {
    "skip_bad": False,
    "split": "",
    "max_samples": 0,
    "max_tokens": 128,
    "pretrained": True,
    "dropout": "auto",
}
"""Settings that a task may take besides data and model, and their defaults.

A task of one's own takes one if its function has a parameter of that name. One that is set, and
that the task does not take, is refused.
"""

__all__ = [
    "GIVEN_IN_PYTHON",
    "OPTIONS",
    "TASKS",
    "Task",
    "check_weights",
    "given_task",
    "load_benchmark",
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
    _REGISTERED[name] = task
    return name


def given_task(name: str) -> "Task | None":
    """Return the task that was registered under a name in this process; None if none was."""
    return _REGISTERED.get(name)


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
        Of `OPTIONS`; those that the task does not take must be at their default.

    Raises
    ------
    UsageError
        If there is no such task, or it refuses one of the settings.
    """
    task = _REGISTERED.get(name)
    options = {**OPTIONS, **options}
    if task is not None:
        refuse_set(name, {"data": data, "model": model, **options})
    elif name in TASKS:
        benchmark = load_benchmark(name)
        refuse_set(name, options, benchmark.options)
        task = benchmark.task(data, model, options)
    else:
        task = _own_task(name, data, model, options)
    if validation_share == 0:
        return task
    from .task import with_validation

    return with_validation(task, validation_share, seed)


def load_saved_model(
    task: str, model: str, tensors: Mapping[str, "Tensor"], dropout: float | str = "auto"
) -> "nn.Module":
    """Return a fresh model for saved weights, of a task in `TASKS`; its data is not needed.

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
    if task in _REGISTERED:
        return _REGISTERED[task].model()
    return load_benchmark(task).saved_model(model, tensors, dropout)


def check_weights(task: str, model: str = "", pretrained: bool = True) -> None:
    """Refuse a model whose published weights cannot be had, before minutes go into its data.

    Only the server does: workers get the weights with the first round, and a saved run has its
    own. See `Benchmark.check_weights`; other tasks have none.
    """
    if pretrained and task not in _REGISTERED and task in TASKS:
        load_benchmark(task).check_weights(model)


def load_benchmark(name: str) -> "Benchmark":
    """Return the benchmark of a name in `TASKS`."""
    module = importlib.import_module(f"{__name__}.{TASKS[name]}")
    benchmark: Benchmark = module.BENCHMARKS[name]
    return benchmark


def refuse_set(name: str, settings: Mapping[str, Any], taken: Collection[str] = ()) -> None:
    """Refuse settings that are not at their default and that a task does not take."""
    for key, value in settings.items():
        if key not in taken and value != OPTIONS.get(key, ""):
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise UsageError(
                f"{key.replace('_', '-')} = {shown}: task = {name!r} does not take it; leave it out"
            )


def _own_task(name: str, data: str, model: str, options: Mapping[str, Any]) -> "Task":
    from .task import Task

    make = _own_function(name)
    try:
        parameters = list(inspect.signature(make).parameters)
    except (TypeError, ValueError) as error:
        raise UsageError(f"task = {name!r} cannot be loaded: {error}") from None
    known = {key: value for key, value in options.items() if key in parameters}
    refuse_set(name, options, known)
    if set(parameters) - set(options):
        task = make(data, model, **known)
    else:
        refuse_set(name, {"data": data, "model": model})
        task = make(**known)
    if not isinstance(task, Task):
        raise UsageError(f"task = {name!r} returned {type(task).__name__}, not a Task")
    return task


def _own_function(name: str) -> Callable[..., Any]:
    module_name, colon, function_name = name.partition(":")
    if not colon:
        near = nearest(name, [*TASKS, *_REGISTERED])
        raise UsageError(f"task = {name!r} is not known; {near}, or module:function")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        hint = "; put its folder into PYTHONPATH, or install it" if missing else ""
        raise UsageError(f"task = {name!r} cannot be loaded: {error}{hint}") from None
    return function
