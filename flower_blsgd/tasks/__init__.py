"""Training tasks: built-in ones by name, custom ones as ``module:function`` or as objects.

Importing this package does not import torch.
"""

from typing import TYPE_CHECKING, Any

from .names import GIVEN_IN_PYTHON, TASK_OPTIONS, TASKS

if TYPE_CHECKING:
    from .by_name import load_task, register_task
    from .task import Task

__all__ = ["GIVEN_IN_PYTHON", "TASKS", "TASK_OPTIONS", "Task", "load_task", "register_task"]


def __getattr__(name: str) -> Any:
    """Load a public name that needs torch on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import by_name

    return getattr(by_name, name)
