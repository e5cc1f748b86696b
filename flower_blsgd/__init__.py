"""Train on fast and slow devices at once: biased local SGD for Flower and PyTorch.

Importing this package imports nothing else; each name below is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Evaluation as Evaluation
    from .api import TrainResult as TrainResult
    from .api import evaluate_run as evaluate_run
    from .api import load as load
    from .api import train as train
    from .errors import UsageError as UsageError
    from .grids.app_call import serve_sessions as serve_sessions
    from .grids.stream.grid import StreamGrid as StreamGrid
    from .grids.stream.grid import stream as stream
    from .protocol import TrainOrder as TrainOrder
    from .protocol import TrainReport as TrainReport
    from .protocol import WorkerProfile as WorkerProfile
    from .strategy.biased_local_sgd import BiasedLocalSGD as BiasedLocalSGD
    from .tasks import Task as Task
    from .worker.local_sgd import LocalSGD as LocalSGD
    from .worker.profile import answer_profile as answer_profile
    from .worker.profile import worker_of as worker_of

_MODULES = {
    "BiasedLocalSGD": "strategy.biased_local_sgd",
    "Evaluation": "api",
    "LocalSGD": "worker.local_sgd",
    "StreamGrid": "grids.stream.grid",
    "Task": "tasks.task",
    "TrainOrder": "protocol",
    "TrainReport": "protocol",
    "TrainResult": "api",
    "UsageError": "errors",
    "WorkerProfile": "protocol",
    "answer_profile": "worker.profile",
    "evaluate_run": "api",
    "load": "api",
    "serve_sessions": "grids.app_call",
    "stream": "grids.stream.grid",
    "train": "api",
    "worker_of": "worker.profile",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Load a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
