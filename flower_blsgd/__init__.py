"""Train on fast and slow devices at once: biased local SGD for Flower and PyTorch.

Importing this package imports nothing else; each name below is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .protocol import TrainOrder, TrainReport, WorkerProfile
    from .strategy import BiasedLocalSGD
    from .tasks import Task
    from .worker.local_sgd import LocalSGD
    from .worker.profile import answer_profile

__all__ = [
    "BiasedLocalSGD",
    "LocalSGD",
    "Task",
    "TrainOrder",
    "TrainReport",
    "WorkerProfile",
    "answer_profile",
]

_MODULES = {
    "BiasedLocalSGD": "strategy",
    "LocalSGD": "worker.local_sgd",
    "Task": "tasks",
    "TrainOrder": "protocol",
    "TrainReport": "protocol",
    "WorkerProfile": "protocol",
    "answer_profile": "worker.profile",
}


def __getattr__(name: str) -> Any:
    """Load a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
