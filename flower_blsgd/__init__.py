"""Train on fast and slow devices at once: biased local SGD for Flower and PyTorch.

Importing this package imports neither torch nor ray nor matplotlib.
"""

from typing import TYPE_CHECKING, Any

from .protocol import TrainOrder, TrainReport, WorkerProfile
from .worker.profile import answer_profile

if TYPE_CHECKING:
    from .strategy import BiasedLocalSGD
    from .tasks import Task
    from .worker.local_sgd import LocalSGD

__all__ = [
    "BiasedLocalSGD",
    "LocalSGD",
    "Task",
    "TrainOrder",
    "TrainReport",
    "WorkerProfile",
    "answer_profile",
]

_LATE = {"BiasedLocalSGD": ".strategy", "LocalSGD": ".worker.local_sgd", "Task": ".tasks"}


def __getattr__(name: str) -> Any:
    """Import what needs torch, or Flower's server side, only when it is asked for."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATE[name], __name__), name)
