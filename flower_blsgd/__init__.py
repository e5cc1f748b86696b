"""Train on fast and slow devices together: biased local SGD for Flower and PyTorch.

Importing this package imports nothing else; each name below is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithm.averaging import EqualWeighting as EqualWeighting
    from .algorithm.averaging import LoadWeighting as LoadWeighting
    from .algorithm.averaging import NormalizedWeighting as NormalizedWeighting
    from .algorithm.averaging import PerSampleWeighting as PerSampleWeighting
    from .algorithm.averaging import Weighting as Weighting
    from .algorithm.local_steps import BalancedBatches as BalancedBatches
    from .algorithm.local_steps import Participant as Participant
    from .algorithm.local_steps import SameSteps as SameSteps
    from .algorithm.local_steps import StepPolicy as StepPolicy
    from .algorithm.local_steps import SystemAwareSteps as SystemAwareSteps
    from .algorithm.loss_table import LossTable as LossTable
    from .algorithm.outer_optimizer import OuterOptimizer as OuterOptimizer
    from .algorithm.outer_optimizer import OuterSGD as OuterSGD
    from .algorithm.randomness import generator as generator
    from .algorithm.sampling import EpochRequest as EpochRequest
    from .algorithm.sampling import SampleList as SampleList
    from .algorithm.sampling import Sampler as Sampler
    from .algorithm.sampling import SeparatedSampler as SeparatedSampler
    from .algorithm.sampling import UnifiedSampler as UnifiedSampler
    from .algorithm.sampling import UniformSampler as UniformSampler
    from .algorithm.schedules import LearningRate as LearningRate
    from .algorithm.selection import ActiveBias as ActiveBias
    from .algorithm.selection import ImportanceSampling as ImportanceSampling
    from .algorithm.selection import InfoBatch as InfoBatch
    from .algorithm.selection import Selected as Selected
    from .algorithm.selection import Selection as Selection
    from .algorithm.selection import SelectionRequest as SelectionRequest
    from .api import Evaluation as Evaluation
    from .api import TrainResult as TrainResult
    from .api import evaluate_run as evaluate_run
    from .api import load as load
    from .api import train as train
    from .devices.pinning import pinned as pinned
    from .devices.worker_spec import WorkerSpec as WorkerSpec
    from .devices.worker_spec import parse_workers as parse_workers
    from .engines.local.grid import LocalGrid as LocalGrid
    from .engines.stream.grid import StreamGrid as StreamGrid
    from .engines.stream.grid import stream as stream
    from .engines.stream.serving import serve_sessions as serve_sessions
    from .errors import UsageError as UsageError
    from .flower.app_call import accept_views as accept_views
    from .hosts.several_devices import several_devices as several_devices
    from .protocol import TrainOrder as TrainOrder
    from .protocol import TrainReport as TrainReport
    from .protocol import WorkerProfile as WorkerProfile
    from .results.folder import EpochRow as EpochRow
    from .results.folder import scalars as scalars
    from .session.first import main_first as main_first
    from .session.session import Session as Session
    from .session.session import join as join
    from .strategy.biased_local_sgd import BiasedLocalSGD as BiasedLocalSGD
    from .strategy.budget import Budget as Budget
    from .strategy.round_metrics import RoundRecord as RoundRecord
    from .strategy.round_metrics import WorkerRound as WorkerRound
    from .strategy.rounds import EpochEnd as EpochEnd
    from .strategy.rounds import RoundEnd as RoundEnd
    from .tasks import Task as Task
    from .worker.local_sgd import LocalSGD as LocalSGD
    from .worker.losses import binary_cross_entropy as binary_cross_entropy
    from .worker.losses import causal_lm_loss as causal_lm_loss
    from .worker.losses import cross_entropy as cross_entropy
    from .worker.losses import mean_squared_error as mean_squared_error
    from .worker.profile import answer_profile as answer_profile
    from .worker.profile import worker_of as worker_of

_NAMES = {
    "algorithm.averaging": "EqualWeighting LoadWeighting NormalizedWeighting"
    " PerSampleWeighting Weighting",
    "algorithm.local_steps": "BalancedBatches Participant SameSteps StepPolicy SystemAwareSteps",
    "algorithm.loss_table": "LossTable",
    "algorithm.outer_optimizer": "OuterOptimizer OuterSGD",
    "algorithm.randomness": "generator",
    "algorithm.sampling": "EpochRequest SampleList Sampler SeparatedSampler"
    " UnifiedSampler UniformSampler",
    "algorithm.schedules": "LearningRate",
    "algorithm.selection": "ActiveBias ImportanceSampling InfoBatch"
    " Selected Selection SelectionRequest",
    "api": "Evaluation TrainResult evaluate_run load train",
    "errors": "UsageError",
    "flower.app_call": "accept_views",
    "engines.local.grid": "LocalGrid",
    "devices.pinning": "pinned",
    "engines.stream.grid": "StreamGrid stream",
    "engines.stream.serving": "serve_sessions",
    "devices.worker_spec": "WorkerSpec parse_workers",
    "hosts.several_devices": "several_devices",
    "protocol": "TrainOrder TrainReport WorkerProfile",
    "results.folder": "EpochRow scalars",
    "session.first": "main_first",
    "session.session": "Session join",
    "strategy.biased_local_sgd": "BiasedLocalSGD",
    "strategy.budget": "Budget",
    "strategy.round_metrics": "RoundRecord WorkerRound",
    "strategy.rounds": "EpochEnd RoundEnd",
    "tasks": "Task",
    "worker.local_sgd": "LocalSGD",
    "worker.losses": "binary_cross_entropy causal_lm_loss cross_entropy mean_squared_error",
    "worker.profile": "answer_profile worker_of",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Load a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
