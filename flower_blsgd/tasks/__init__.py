"""The training tasks by name; a user's own by ``module:function``."""

import importlib
import inspect
from collections.abc import Mapping

from ..errors import UsageError, nearest
from .task import Task

TASKS: Mapping[str, str] = {"digits": "flower_blsgd.tasks.digits:digits"}
"""Where each task is made: a function ``(data, model) -> Task`` of two texts."""

__all__ = ["TASKS", "Task", "load_task"]


def load_task(name: str, data: str = "", model: str = "") -> Task:
    """Return a task by name.

    Parameters
    ----------
    name : str
        A name in `TASKS`, or ``module:function``.
    data, model : str (default: "")
        Where the data is and which model; empty for the task's own default.

    Returns
    -------
    Task
        Data and model maker.

    Raises
    ------
    UsageError
        If there is no such task, or it refuses `data` or `model`.
    """
    reference = TASKS.get(name, name)
    module_name, colon, function_name = reference.partition(":")
    if not colon:
        raise UsageError(
            f"task = {name!r} is not known; {nearest(name, TASKS)}, or module:function"
        )
    try:
        make = getattr(importlib.import_module(module_name), function_name)
        takes_texts = bool(inspect.signature(make).parameters)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"task = {name!r} cannot be loaded: {error}") from None
    task = make(data, model) if takes_texts else make()
    if not isinstance(task, Task):
        raise UsageError(f"task = {name!r} returned {type(task).__name__}, not a Task")
    return task
