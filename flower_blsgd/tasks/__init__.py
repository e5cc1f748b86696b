"""The training tasks by name; a user's own by ``module:function`` or as an object.

Importing this imports no torch; `Task` and what loads one are in `task`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .task import Task, load_task, register_task

__all__ = ["GIVEN_IN_PYTHON", "OPTIONS", "TASKS", "Task", "load_task", "register_task"]

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


def __getattr__(name: str) -> Any:
    """Load a public name that needs torch when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import task

    return getattr(task, name)
