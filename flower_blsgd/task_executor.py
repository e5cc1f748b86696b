"""Executor of a task's orders; see `worker.executor.Executor`.

In Flower's simulation, one process serves several nodes in turn. So the state of a node is kept in
its context, and equal nodes share a model.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, Context

from .config import RunConfig
from .devices.pinning import pinned
from .devices.worker_spec import WORKERS_ON_DEVICE, WorkerSpec
from .protocol import MOMENTUM, EvaluateOrder, EvaluateReport, TrainOrder, TrainReport

if TYPE_CHECKING:
    from torch import nn

    from .tasks import Task
    from .worker.batches import BatchSource
    from .worker.local_sgd import LocalSGD


@contextlib.contextmanager
def task_executor(worker: WorkerSpec, context: Context) -> Iterator["TaskExecutor"]:
    """Yield the executor of a node, pinned to the worker's device and cores."""
    config = _config(tuple(context.run_config.items()))
    with pinned(worker, config.threads):
        yield TaskExecutor(config, worker, context)


class TaskExecutor:
    """Executor of a task's orders on one worker."""

    def __init__(self, config: RunConfig, worker: WorkerSpec, context: Context) -> None:
        self._config = config
        self._worker = worker
        self._state = context.state
        self._sharing = int(context.node_config.get(WORKERS_ON_DEVICE, 1))

    @property
    def num_test(self) -> int:
        """Number of test samples."""
        return _task(self._config).num_test

    def fingerprints(self) -> tuple[str, str]:
        """Return the fingerprints of the training data and of the model."""
        from .worker.model_io import model_fingerprint

        model = self._sgd.model  # the executor of round 1 is then ready
        return _task(self._config).fingerprint(), model_fingerprint(model)

    def seconds_per_step(self, batch_size: int, seconds: float) -> float:
        """Measure the speed with orders that have no effect."""
        from .worker.profile import seconds_per_step

        return seconds_per_step(self._sgd, batch_size, seconds)

    def train(self, order: TrainOrder) -> TrainReport:
        """Run the steps of an order. The optimizer's state is kept in the node's state."""
        return self._sgd.run(order, state=self._state)

    def work_ahead(self) -> None:
        """Do the first step of the next round."""
        self._sgd.work_ahead(self._state)

    def own_model(self) -> ArrayRecord:
        """Return the model of the last order."""
        return self._sgd.own_model()

    def evaluate(self, order: EvaluateOrder) -> EvaluateReport:
        """Evaluate in this worker's precision."""
        from .worker.loader import loader_workers
        from .worker.model_io import load_state
        from .worker.step import use_precision

        config, worker = self._config, self._worker
        device = worker.torch_device
        model = _evaluation_model(config, worker, self._sharing)
        settings = {
            **config.evaluation_settings,
            "precision": worker.precision or config.precision,
            "loader_workers": loader_workers(config.loader_workers, len(worker.cores)),
        }
        use_precision(settings["precision"], device)
        load_state(model, order.arrays)
        return _task(config).evaluate(model, device, order.first, order.last, **settings)

    def optimizer_state(self) -> ArrayRecord:
        """Return the state in the node's state."""
        return self._state.array_records.get(MOMENTUM, ArrayRecord())

    @property
    def _sgd(self) -> "LocalSGD":
        return _local_sgd(self._config, self._worker, self._sharing)


@functools.lru_cache(maxsize=8)  # all messages have the same settings
def _config(settings: tuple[tuple[str, bool | float | int | str], ...]) -> RunConfig:
    return RunConfig.from_run_config(dict(settings))


@functools.lru_cache(maxsize=1)
def _task(config: RunConfig) -> "Task":
    from .tasks.by_name import load_task

    return load_task(**config.task_settings)


@functools.lru_cache(maxsize=8)
def _samples(config: RunConfig, device: str, num_cores: int, sharing: int) -> "BatchSource":
    """Return the training data, one copy on the device for all nodes of this process.

    `sharing` is the number of processes with such a copy.
    """
    import torch

    from .worker.batches import BatchSource
    from .worker.loader import loader_workers

    task = _task(config)
    return BatchSource(
        task.train,
        torch.device(device),
        collate=task.collate,
        loader_workers=loader_workers(config.loader_workers, num_cores),
        workers_on_device=sharing,
    )


@functools.lru_cache(maxsize=128)
def _local_sgd(config: RunConfig, worker: WorkerSpec, sharing: int) -> "LocalSGD":
    from .worker.local_sgd import LocalSGD

    task = _task(config)
    return LocalSGD(
        task.replica(config.seed),
        _samples(config, worker.torch_device, len(worker.cores), sharing),
        task.loss,
        worker.torch_device,
        optimizer=task.optimizer or config.optimizer,
        peak_learning_rate=config.learning_rate,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        slowdown=worker.slowdown,
        augment=task.augment,
        precision=worker.precision or config.precision,
        channels_last=config.channels_last,
        compile=config.compile,
        name=worker.name or worker.device_with_cores,
        micro_batch_size=config.micro_batch_size,
    )


@functools.lru_cache(maxsize=128)
def _evaluation_model(config: RunConfig, worker: WorkerSpec, sharing: int) -> "nn.Module":
    """Return a second model, so that evaluation does not change the one that trains.

    What is frozen, such as the base of an adapter, is in memory once.
    """
    from .worker.model_io import share_frozen

    model = _task(config).replica(config.seed)
    share_frozen(model, _local_sgd(config, worker, sharing).model)
    return model
