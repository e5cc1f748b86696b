"""Train on fast and slow devices at once: biased local SGD for Flower and PyTorch.

Importing this package imports nothing else; each name below is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Evaluation, TrainResult, evaluate_run, load, train
    from .errors import UsageError
    from .protocol import TrainOrder, TrainReport, WorkerProfile
    from .runtime.stream.client import serve_sessions
    from .runtime.stream.grid import StreamGrid, stream
    from .strategy import BiasedLocalSGD
    from .tasks import Task
    from .worker.local_sgd import LocalSGD
    from .worker.profile import answer_profile, worker_of

__all__ = [
    "BiasedLocalSGD",
    "Evaluation",
    "LocalSGD",
    "StreamGrid",
    "Task",
    "TrainOrder",
    "TrainReport",
    "TrainResult",
    "UsageError",
    "WorkerProfile",
    "answer_profile",
    "evaluate_run",
    "load",
    "serve_sessions",
    "stream",
    "train",
    "worker_of",
]

_MODULES = {
    "BiasedLocalSGD": "strategy",
    "Evaluation": "api",
    "LocalSGD": "worker.local_sgd",
    "StreamGrid": "runtime.stream.grid",
    "Task": "tasks",
    "TrainOrder": "protocol",
    "TrainReport": "protocol",
    "TrainResult": "api",
    "UsageError": "errors",
    "WorkerProfile": "protocol",
    "answer_profile": "worker.profile",
    "evaluate_run": "api",
    "load": "api",
    "serve_sessions": "runtime.stream.client",
    "stream": "runtime.stream.grid",
    "train": "api",
    "worker_of": "worker.profile",
}


def __getattr__(name: str) -> Any:
    """Load a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
