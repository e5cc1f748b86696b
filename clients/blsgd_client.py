"""The ClientApp: a message in, a library call, a reply out.

Nothing here imports torch at module level: the device is known only inside a handler, and
pinning comes before torch.
"""

import functools
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_blsgd.config import RunConfig
from flower_blsgd.protocol import TrainOrder
from flower_blsgd.runtime.devices import WorkerSpec
from flower_blsgd.runtime.pinning import pinned
from flower_blsgd.worker.profile import answer_profile, worker_of

if TYPE_CHECKING:
    from flower_blsgd.tasks import Task
    from flower_blsgd.worker.local_sgd import LocalSGD

app = ClientApp()


@app.query("profile")
def profile(message: Message, context: Context) -> Message:
    """Say which worker this node is, and which data it holds."""
    config = RunConfig.from_run_config(context.run_config)
    worker = worker_of(context)
    with pinned(worker, config.threads):
        fingerprint = _task(config.task, config.data, config.model).fingerprint()
        _local_sgd(config, worker)  # where the process lives on, the first round finds it ready
    return answer_profile(message, context, fingerprint)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do the steps of one order; momentum is kept in the node's state."""
    config = RunConfig.from_run_config(context.run_config)
    worker = worker_of(context)
    with pinned(worker, config.threads):
        sgd = _local_sgd(config, worker)
        report = sgd.run(TrainOrder.from_message(message), state=context.state)
    return report.to_reply(message)


@functools.lru_cache(maxsize=1)
def _task(name: str, data: str, model: str) -> "Task":
    from flower_blsgd.tasks import load_task

    return load_task(name, data, model)


@functools.lru_cache(maxsize=8)  # a process of Flower's simulation serves several nodes in turn
def _local_sgd(config: RunConfig, worker: WorkerSpec) -> "LocalSGD":
    from flower_blsgd.worker.local_sgd import LocalSGD

    task = _task(config.task, config.data, config.model)
    return LocalSGD(
        task.model(),
        task.train,
        task.loss,
        worker.device,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        slowdown=worker.slowdown,
    )
