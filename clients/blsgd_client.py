"""The ClientApp: a message in, a library call, a reply out.

Nothing here imports torch at module level: the device is known only inside a handler, and
pinning comes before torch.
"""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_blsgd.config import RunConfig
from flower_blsgd.host.mod import several_devices
from flower_blsgd.protocol import EvaluateOrder, ProfileQuery, TrainOrder
from flower_blsgd.runtime.devices import WorkerSpec
from flower_blsgd.runtime.pinning import pinned
from flower_blsgd.runtime.shared_arrays import accept_views
from flower_blsgd.runtime.stream.serve import serve_sessions
from flower_blsgd.worker.profile import answer_profile, given_seconds_per_step, worker_of
from flower_blsgd.worker.summing import answer_sum
from flower_blsgd.worker.tracing import OrderTrace

if TYPE_CHECKING:
    from torch import nn

    from flower_blsgd.tasks import Task
    from flower_blsgd.worker.batches import Samples
    from flower_blsgd.worker.local_sgd import LocalSGD
    from flower_blsgd.worker.replica import ReplicaTeam

_ONCE = threading.RLock()  # workers that share a process may ask for the same at the same time

app = ClientApp(mods=[several_devices(f"{__name__}:app", Path(__file__).parents[1])])
accept_views(app)
serve_sessions(app)


@app.query("profile")
def profile(message: Message, context: Context) -> Message:
    """Say which worker this node is, which data it holds, and how fast it is if that is asked."""
    config = RunConfig.from_run_config(context.run_config)
    worker = worker_of(context)
    query = ProfileQuery.from_message(message)
    seconds = 0.0
    with pinned(worker, config.threads):
        task = _task_of(config)
        # Where the process lives on, the first round finds it ready.
        sgd = _local_sgd(config, worker, _owner(worker, context))
        if query.calibrate and not given_seconds_per_step(context):
            from flower_blsgd.worker.calibration import seconds_per_step

            seconds = seconds_per_step(sgd, query.batch_size, task.num_train, query.seconds)
        from flower_blsgd.worker.model_state import model_fingerprint

        fingerprint, model = task.fingerprint(), model_fingerprint(sgd.model)
    return answer_profile(message, context, fingerprint, seconds, model)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do the steps of one order; momentum is kept in the node's state."""
    trace = OrderTrace(message)
    config = RunConfig.from_run_config(context.run_config)
    worker = worker_of(context)
    with pinned(worker, config.threads):
        sgd = _local_sgd(config, worker, _owner(worker, context))
        order = TrainOrder.from_message(message)
        with trace.around_steps(worker):
            report = sgd.run(order, state=context.state)
    return trace.reply(report, message)


@app.train("sum")
def add_up(message: Message, context: Context) -> Message:
    """Add up a slice of other workers' models, where this one does not train."""
    with pinned(worker_of(context), RunConfig.from_run_config(context.run_config).threads):
        return answer_sum(message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate a slice of the test set, or all of it where none is ordered."""
    config = RunConfig.from_run_config(context.run_config)
    worker = worker_of(context)
    with pinned(worker, config.threads):
        from flower_blsgd.worker.evaluation import evaluate_sums
        from flower_blsgd.worker.gate import gate_of
        from flower_blsgd.worker.model_state import load_state
        from flower_blsgd.worker.precision import use_precision

        task = _task_of(config)
        order = EvaluateOrder.from_message(message, task.num_test)
        model = _evaluation_model(config, worker.device, _owner(worker, context))
        use_precision(config.precision, worker.device)
        with gate_of(worker.device).computing():
            load_state(model, order.arrays)
            report = evaluate_sums(
                model,
                task.test,
                task.loss,
                task.metric,
                worker.device,
                order.first,
                order.last,
                task.evaluation_batch_size,
            )
    return report.to_reply(message)


def _owner(worker: WorkerSpec, context: Context) -> int:
    """Return whose models these are: equal CPU workers of a process take turns with one.

    On an accelerator the workers of a process run side by side.
    """
    return 0 if worker.device == "cpu" else context.node_id


def _task_of(config: RunConfig) -> "Task":
    with _ONCE:
        return _task(
            config.task,
            config.data,
            config.model,
            config.validation_share,
            config.seed,
            tuple(config.task_options.items()),
        )


@functools.lru_cache(maxsize=1)
def _task(
    name: str,
    data: str,
    model: str,
    validation_share: float,
    seed: int,
    options: tuple[tuple[str, Any], ...],
) -> "Task":
    from flower_blsgd.tasks import load_task

    return load_task(
        name, data, model, validation_share=validation_share, seed=seed, **dict(options)
    )


def _samples_of(config: RunConfig, device: str) -> "Samples":
    with _ONCE:
        return _samples(config, device)


@functools.lru_cache(maxsize=8)
def _samples(config: RunConfig, device: str) -> "Samples":
    """Return the training data, on an accelerator once for all workers of this process."""
    from flower_blsgd.worker.device_samples import samples_on
    from flower_blsgd.worker.gate import gate_of

    task = _task_of(config)
    with gate_of(device).computing():
        return samples_on(task.train, device)


def _team_of(config: RunConfig, device: str) -> "ReplicaTeam":
    with _ONCE:
        return _team(config, device)


@functools.lru_cache(maxsize=8)
def _team(config: RunConfig, device: str) -> "ReplicaTeam":
    """Return the workers of this process on one accelerator, which compute together."""
    from flower_blsgd.worker.gate import gate_of
    from flower_blsgd.worker.replica import ReplicaTeam
    from flower_blsgd.worker.replica_sgd import ReplicaSGD

    task, samples = _task_of(config), _samples_of(config, device)
    with gate_of(device).computing():
        return ReplicaTeam(
            ReplicaSGD(
                task.model(),
                samples,
                task.loss,
                device,
                optimizer=config.optimizer,
                momentum=config.momentum,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
                augment=task.augment,
                precision=config.precision,
                micro_batch_size=config.micro_batch_size,
            )
        )


@functools.lru_cache(maxsize=128)  # a process serves several nodes, side by side or in turn
def _local_sgd(config: RunConfig, worker: WorkerSpec, owner: int) -> "LocalSGD":
    from flower_blsgd.worker.gate import gate_of
    from flower_blsgd.worker.local_sgd import LocalSGD

    task, samples = _task_of(config), _samples_of(config, worker.device)
    kind: Callable[..., LocalSGD] = LocalSGD
    if config.replicas == "batched" and worker.device != "cpu":
        kind = _team_of(config, worker.device).member(owner)
    with gate_of(worker.device).computing():  # `_ONCE` may be held around it, never inside
        return kind(
            task.model(),
            samples,
            task.loss,
            worker.device,
            optimizer=config.optimizer,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            slowdown=worker.slowdown,
            augment=task.augment,
            precision=config.precision,
            channels_last=config.channels_last,
            compile=config.compile,
            cuda_graph=config.cuda_graph,
            name=worker.name or worker.device_with_cores,
            micro_batch_size=config.micro_batch_size,
        )


@functools.lru_cache(maxsize=32)
def _evaluation_model(config: RunConfig, device: str, owner: int) -> "nn.Module":
    """Return a model beside the one that trains, so that evaluating leaves that alone."""
    from flower_blsgd.worker.gate import gate_of

    task = _task_of(config)
    with gate_of(device).computing():
        return task.model()
