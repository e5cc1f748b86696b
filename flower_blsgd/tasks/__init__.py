"""Training tasks: built-in ones by name, custom ones as ``module:function`` or as objects.

Importing this package does not import torch; `Task` is in `task`, and its loaders are in `by_name`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .by_name import load_task, register_task
    from .task import Task

__all__ = ["GIVEN_IN_PYTHON", "OPTIONS", "TASKS", "Task", "load_task", "register_task"]

TASKS: Mapping[str, str] = {
    "digits": "digits",
    "images": "images",
    "text": "texts",
    "lm": "lm",
    "cifar10": "images",
    "cifar100": "images",
    "flowers102": "images",
    "tiny-imagenet": "images",
    "ag-news": "texts",
}
"""The built-in tasks, and the module of this package whose `BENCHMARKS` contains each."""

GIVEN_IN_PYTHON = "given-in-python"
"""Name of a task that was given as an object."""

OPTIONS: Mapping[str, Any] = {
    "skip_bad": False,
    "split": "",
    "max_samples": 0,
    "image_size": 0,
    "max_tokens": 128,
    "lora_rank": 0,
    "pretrained": True,
    "dropout": "auto",
}
"""Settings that a task may accept in addition to data and model, with their defaults.

A custom task accepts one if its function has a parameter of that name. Setting one that the task
does not accept is an error.
"""


def __getattr__(name: str) -> Any:
    """Load a public name that needs torch on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import by_name

    return getattr(by_name, name)
