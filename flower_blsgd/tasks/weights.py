"""Whether the weights that a run begins with can be had, before minutes go into its data."""

import importlib

from . import TASKS, given_task


def check_weights(task: str, model: str = "", pretrained: bool = True) -> None:
    """Refuse a model whose published weights cannot be had.

    A task with such models has a function ``check_weights(model)`` beside it in its module. Only
    the server asks it: workers get the weights with the first round, and a saved run has its own.

    Parameters
    ----------
    task : str
        The task's name; one that is not in `TASKS` is not asked.
    model : str (default: "")
        Which model; empty for the task's own default.
    pretrained : bool (default: True)
        False asks nobody.

    Raises
    ------
    UsageError
        If there is no such model, or its weights are out of reach.
    """
    if not pretrained or given_task(task) is not None or task not in TASKS:
        return
    module = importlib.import_module(TASKS[task].partition(":")[0])
    check = getattr(module, "check_weights", None)
    if check is not None:
        check(model)
