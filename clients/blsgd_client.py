"""The ClientApp: a message in, a library call, a reply out.

Nothing here imports torch at module level: the device is known only inside a handler, which must
pin the process before it imports torch. In Flower's simulation one process serves several nodes in
turn. So the state of a node is kept in its context, and pinning is undone after every message.
"""

import dataclasses
import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_blsgd.config import RunConfig
from flower_blsgd.devices.pinning import pinned
from flower_blsgd.devices.worker_spec import WORKERS_ON_DEVICE, WorkerSpec
from flower_blsgd.engines.stream.serving import serve_sessions
from flower_blsgd.flower.app_call import accept_views
from flower_blsgd.hosts.several_devices import several_devices
from flower_blsgd.protocol import (
    CONFIG,
    MOMENTUM,
    SCRIPT,
    TRACE_FOLDER,
    EvaluateOrder,
    ProfileQuery,
    TrainOrder,
)
from flower_blsgd.worker.profile import answer_profile, answer_sum, worker_of

if TYPE_CHECKING:
    from torch import nn

    from flower_blsgd.tasks import Task
    from flower_blsgd.worker.batches import BatchSource
    from flower_blsgd.worker.local_sgd import LocalSGD

app = ClientApp(mods=[several_devices(f"{__name__}:app", Path(__file__).parents[1])])
accept_views(app)


def _app_of(context: Context) -> ClientApp:
    """Return the app of a node: the user's script, if the node config names one."""
    if SCRIPT not in context.node_config:
        return app
    from flower_blsgd.session.client import app as script_app

    return script_app


serve_sessions(app, _app_of)


@app.query("profile")
def profile(message: Message, context: Context) -> Message:
    """Reply with the worker's profile and, if queried, its measured speed."""
    config = _config(context)
    worker = worker_of(context)
    query = ProfileQuery.from_message(message)
    seconds = 0.0
    with pinned(worker, config.threads):
        task = _task(config)
        sgd = _local_sgd(config, worker, _sharing(context))  # cached for round 1
        if query.calibrate and not worker.seconds_per_step:
            from flower_blsgd.worker.timing import seconds_per_step

            seconds = seconds_per_step(sgd, query.batch_size, query.seconds)
        from flower_blsgd.worker.model_io import model_fingerprint

        fingerprint, model = task.fingerprint(), model_fingerprint(sgd.model)
    return answer_profile(message, context, fingerprint, seconds, model)


@app.query("momentum")
def momentum(message: Message, context: Context) -> Message:
    """Reply with the momentum in the node's state, for a checkpoint."""
    kept = context.state.array_records.get(MOMENTUM, ArrayRecord())
    return Message(RecordDict({MOMENTUM: kept}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run the steps of one order. Momentum is kept in the node's state."""
    config = _config(context)
    worker = worker_of(context)
    with pinned(worker, config.threads):
        sgd = _local_sgd(config, worker, _sharing(context))
        order = TrainOrder.from_message(message)
        folder = message.content.config_records[CONFIG].get(TRACE_FOLDER)
        if folder is None:
            report = sgd.run(order, state=context.state)
        else:
            from flower_blsgd.worker.trace import traced

            file = Path(str(folder)) / f"worker-{context.node_config.get('partition-id', 0)}.json"
            with traced(file, order.round) as is_traced:
                report = sgd.run(order, state=context.state)
            report = dataclasses.replace(report, traced=int(is_traced))
    return report.to_reply(message)


@app.train("sum")
def reduce(message: Message, context: Context) -> Message:
    """Average a slice of the other workers' models."""
    with pinned(worker_of(context), _config(context).threads):
        return answer_sum(message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate a slice of the test set, or all of it if the order has no slice."""
    config = _config(context)
    worker = worker_of(context)
    with pinned(worker, config.threads):
        from flower_blsgd.worker.loader import loader_workers
        from flower_blsgd.worker.model_io import load_state
        from flower_blsgd.worker.step import use_precision
        from flower_blsgd.worker.timing import throttle

        task = _task(config)
        order = EvaluateOrder.from_message(message, task.num_test)
        device = worker.torch_device
        model = _evaluation_model(config, device)
        settings = {**config.evaluation_settings, "precision": worker.precision or config.precision}
        settings["loader_workers"] = loader_workers(config.loader_workers, len(worker.cores))
        use_precision(settings["precision"], device)
        load_state(model, order.arrays)
        start = time.perf_counter()
        report = task.evaluate(model, device, order.first, order.last, **settings)
        throttle(start, worker.slowdown, busy=False)
        report = dataclasses.replace(report, seconds=time.perf_counter() - start)
    return report.to_reply(message)


def _config(context: Context) -> RunConfig:
    return _checked(tuple(context.run_config.items()))


@functools.lru_cache(maxsize=8)  # all messages have the same settings
def _checked(settings: tuple[tuple[str, bool | float | int | str], ...]) -> RunConfig:
    return RunConfig.from_run_config(dict(settings))


def _sharing(context: Context) -> int:
    return int(context.node_config.get(WORKERS_ON_DEVICE, 1))


@functools.lru_cache(maxsize=1)
def _task(config: RunConfig) -> "Task":
    from flower_blsgd.tasks.by_name import load_task

    return load_task(**config.task_settings)


@functools.lru_cache(maxsize=8)
def _samples(config: RunConfig, device: str, num_cores: int, sharing: int) -> "BatchSource":
    """Return the training data, one copy on the device for all nodes of this process.

    `sharing` is the number of processes with such a copy.
    """
    import torch

    from flower_blsgd.worker.batches import BatchSource
    from flower_blsgd.worker.loader import loader_workers

    task, processes = _task(config), loader_workers(config.loader_workers, num_cores)
    return BatchSource(
        task.train,
        torch.device(device),
        collate=task.collate,
        loader_workers=processes,
        workers_on_device=sharing,
    )


@functools.lru_cache(maxsize=128)  # equal nodes share one: momentum is in their context
def _local_sgd(config: RunConfig, worker: WorkerSpec, sharing: int = 1) -> "LocalSGD":
    from flower_blsgd.worker.local_sgd import LocalSGD

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


@functools.lru_cache(maxsize=8)
def _evaluation_model(config: RunConfig, device: str) -> "nn.Module":
    """Return a second model, so that evaluation does not change the one that trains."""
    return _task(config).replica(config.seed)
