"""Tasks by name: built-in ones, registered ones, and functions of modules."""

import importlib
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..data.cache import UnusableError, open_entry
from ..data.libraries import import_torchvision, is_repaired
from ..errors import UsageError, nearest
from .names import GIVEN_IN_PYTHON, TASK_OPTIONS, TASKS
from .task import Task, with_validation

_LOG = logging.getLogger(__name__)


class Benchmark:
    """Built-in task with its data and models.

    ``task(data, model, again=, needs_test=, ...)`` prepares the data if this was not done yet, or
    with `again`. It accepts the `TASK_OPTIONS` that it has parameters for. UsageError if the data
    are not available, have no test split although `needs_test` is set, the model is unknown, or the
    options are invalid.

    ``saved_model(model, tensors, dropout)`` returns a new model with the sizes of saved weights,
    made without the data. UsageError if the model is unknown.
    """

    task: Callable[..., Task]
    saved_model: Callable[[str, Mapping[str, Tensor], float | str], nn.Module]
    default_model: str

    def check_weights(self, model: str) -> None:
        """Download the pretrained weights of a model, if it has any; UsageError if this fails.

        Only the server does this, before data are prepared: workers get the weights in the first
        round, and a saved run has its own.
        """


_REGISTERED: dict[str, Callable[..., Task]] = {}
"""Functions that return the tasks registered in this process, by name."""


def register_task(task: Task, name: str = GIVEN_IN_PYTHON) -> str:
    """Register a task for `load_task` in this process, or replace it; return its name."""
    _REGISTERED[name] = lambda: task
    return name


def registration(task: Task | str) -> Callable[[], str]:
    """Return a function that registers a task, to be sent to the workers by pickling.

    If this process has repaired torchvision, a worker does so before it unpickles the task, which
    may use it. A task that is named is not registered, but sent with the state of its module.
    """
    sent = _own_function(task) if isinstance(task, str) and ":" in task else task
    return partial(_register, _Repaired() if is_repaired() else None, sent)


class _Repaired:
    """Unpickled as the result of `import_torchvision`."""

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return import_torchvision, ()


def _register(_: object, task: object) -> str:
    return register_task(task) if isinstance(task, Task) else ""


def load_task(
    name: str,
    data: str = "",
    model: str = "",
    *,
    validation_share: float = 0.0,
    seed: int = 0,
    again: bool = False,
    prefer_test: bool = False,
    given: Task | None = None,
    **options: Any,
) -> Task:
    """Return a task by name: a registered one, one in `TASKS`, or ``module:function``.

    Empty `data` or `model`: the task's default. A `validation_share` above 0 is the fraction of the
    training data, chosen by `seed`, to test on instead of the test set; with `prefer_test`, the
    test set is used nevertheless if there is one. With `again`, the data of a built-in task are
    prepared even if they are ready. `given` is the task, instead of one found by name.

    `options` are `TASK_OPTIONS`; those that the task does not accept must have their default.
    UsageError if the task is unknown or rejects one of the settings.
    """
    registered: Mapping[str, Callable[..., Task]]
    registered = _REGISTERED if given is None else {name: lambda: given}
    if name in registered:
        make = registered[name]
    elif name in TASKS:
        benchmark = _benchmark(name)
        make = benchmark.task
        model = model or benchmark.default_model
    else:
        make = _own_function(name)
    parameters = inspect.signature(make).parameters
    options = {**TASK_OPTIONS, **options}
    known = {key: options[key] for key in TASK_OPTIONS if key in parameters}
    _refuse_set(name, options, known)
    own = {"again": again, "needs_test": validation_share == 0 and not prefer_test}
    known |= {key: own[key] for key in own if key in parameters}
    if set(parameters) - set(known):
        task = make(data, model, **known)
    else:
        _refuse_set(name, {"data": data, "model": model})
        task = make(**known)
    if not isinstance(task, Task):
        raise UsageError(f"task = {name!r} returned {type(task).__name__}, not a Task")
    has_test = task.prepared is None or task.prepared.has_test
    if validation_share == 0 or (prefer_test and has_test):
        return task
    return with_validation(task, validation_share, seed)


def prepare_task(
    name: str, data: str = "", model: str = "", again: bool = False, **options: Any
) -> str:
    """Prepare the data of a task, and return a line that describes them.

    Prepared data are compared with their checksums; a run compares sizes only.
    """
    task = load_task(name, data, model, again=again, prefer_test=True, **options)
    prepared = task.prepared
    if prepared is None:
        made = "" if name in TASKS else ", from its own code"
        return (
            f"{name}: {task.num_train:,} training and {task.num_test:,} test samples{made}; "
            "nothing to prepare"
        )
    try:
        open_entry(prepared.folder, content=True)
    except UnusableError as error:
        _LOG.warning("%s is damaged (%s); preparing it again", prepared.folder, error)
        load_task(name, data, model, again=True, prefer_test=True, **options)
    bad = sum(prepared.skipped.values())
    left_out = f", {bad:,} unreadable ones skipped" if bad else ""
    num_test = task.num_test if prepared.has_test else 0
    classes = prepared.num_classes
    samples = f"{prepared.noun} of {classes} classes" if classes else "blocks of tokens"
    return (
        f"{name}: {task.num_train:,} training and {num_test:,} test {samples}{left_out}, "
        f"ready in {prepared.folder}"
    )


def load_saved_model(
    task: str, model: str, tensors: Mapping[str, Tensor], dropout: float | str = "auto"
) -> nn.Module:
    """Return a new model for saved weights of a task in `TASKS`, see `Benchmark.saved_model`."""
    benchmark = _benchmark(task)
    return benchmark.saved_model(model or benchmark.default_model, tensors, dropout)


def check_weights(task: str, model: str = "", pretrained: bool = True) -> None:
    """Find or download the weights of a model of any task, see `Benchmark.check_weights`."""
    if pretrained and task in TASKS:
        benchmark = _benchmark(task)
        benchmark.check_weights(model or benchmark.default_model)


def _benchmark(name: str) -> Benchmark:
    made: Benchmark = importlib.import_module(f".{TASKS[name]}", __package__).BENCHMARKS[name]
    return made


def _refuse_set(name: str, settings: Mapping[str, Any], taken: Collection[str] = ()) -> None:
    """Raise UsageError for settings that a task does not accept and that are not the default."""
    for key, value in settings.items():
        if key not in taken and value != TASK_OPTIONS.get(key, ""):
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise UsageError(
                f"{key.replace('_', '-')} = {shown}: task = {name!r} does not accept it; leave "
                "it out"
            )


def _own_function(name: str) -> Callable[..., Any]:
    module_name, colon, function_name = name.partition(":")
    if not colon:
        near = nearest(name, TASKS)
        raise UsageError(f"task = {name!r} is not known; {near}, or module:function")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
        inspect.signature(function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        hint = "; put its folder into PYTHONPATH, or install it" if missing else ""
        raise UsageError(f"task = {name!r} cannot be loaded: {error}{hint}") from None
    return function
