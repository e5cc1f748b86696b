"""Answers of a node about its worker, profile and speed; and sums of other workers' models.

Nothing here imports torch at module level: a ClientApp imports this before it knows its device.
"""

import functools
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message

from ..algorithm.averaging import weighted_average
from ..devices.worker_spec import (
    WorkerSpec,
    check_python,
    parse_workers,
    warn_of_unknown_keys,
    worker_from_node_config,
)
from ..errors import UsageError
from ..flower.array_records import tensors_of, view_record
from ..protocol import SumOrder, SumReport, TrainOrder, WorkerProfile

if TYPE_CHECKING:
    from .local_sgd import LocalSGD

_PROBE_STEPS = 3
_MEASUREMENTS = 3


def worker_of(context: Context) -> WorkerSpec:
    """Return the worker that runs on this node.

    Provisional: may change in any minor version.

    The node config of a SuperNode names its device and options. In Flower's simulation there is no
    node config: node i is the i-th worker in the run config's ``workers``.

    UsageError if a value cannot be read, the device does not exist here, or there are more nodes
    than workers.
    """
    given = str(context.run_config.get("workers", "auto"))
    worker = _worker_of(tuple(context.node_config.items()), given)
    check_python(worker)
    return worker


@functools.lru_cache(maxsize=128)  # each message asks again
def _worker_of(node_config: tuple[tuple[str, Any], ...], given: str) -> WorkerSpec:
    config = dict(node_config)
    warn_of_unknown_keys(config)
    if "device" in config:
        return worker_from_node_config(config)
    workers = parse_workers(given)
    rank = int(config.get("partition-id", 0))
    if rank >= len(workers):
        raise UsageError(
            f"node {rank} has no worker: workers = {given!r} names {len(workers)}; start "
            f"{len(workers)} SuperNodes (num-supernodes={len(workers)}), or name more workers"
        )
    return workers[rank]


def answer_profile(
    message: Message,
    context: Context,
    data_fingerprint: str = "",
    seconds_per_step: float = 0.0,
    model_fingerprint: str = "",
) -> Message:
    """Answer the profile query of the strategy.

    Register it in any ClientApp with ``app.query("profile")(flower_blsgd.answer_profile)``.

    Parameters
    ----------
    message, context
        Arguments of the ClientApp's function. The node config may hold ``device``,
        ``partition-id`` and the options of `WorkerOptions`.
    data_fingerprint, model_fingerprint : str (default: "")
        Fields of `WorkerProfile`.
    seconds_per_step : float (default: 0.0)
        Measured seconds per step; the node config's ``seconds-per-step`` takes precedence. 0:
        unknown.

    Raises
    ------
    UsageError
        If a value in the node config cannot be read, or the device is missing.
    """
    profile = WorkerProfile.of(worker_of(context), int(context.node_config.get("partition-id", -1)))
    return replace(
        profile,
        seconds_per_step=profile.seconds_per_step or seconds_per_step,
        data_fingerprint=data_fingerprint,
        model_fingerprint=model_fingerprint,
    ).to_reply(message)


def answer_sum(message: Message) -> Message:
    """Reply to a sum order (of ``byteps``) with the weighted average of its slices.

    ProtocolError if the message holds no such order.
    """
    order = SumOrder.from_message(message)
    started_at, start = time.time(), time.perf_counter()
    summed = weighted_average([tensors_of(part) for part in order.slices], order.weights)
    ended_at = started_at + time.perf_counter() - start
    return SumReport(view_record(summed), started_at, ended_at).to_reply(message)


def seconds_per_step(sgd: "LocalSGD", batch_size: int, seconds: float = 1.0) -> float:
    """Measure the seconds of one training step, including an emulated slowdown.

    After a warm-up step, three steps show how many fit into `seconds`. If they took that long, they
    are the measurement; otherwise it is the median of three further orders that share this time.

    The orders are ordinary ones with a learning rate of 0. They do not affect training: each order
    brings its own weights, buffers and seed, and momentum is set to zero afterwards.
    """
    import numpy as np

    from .model_io import state_record

    arrays = state_record(sgd.model)
    draw = np.random.default_rng(0)

    def measured(steps: int) -> float:
        order = TrainOrder.to_measure(steps, batch_size, sgd.num_samples, arrays, draw)
        return sgd.run(order).compute_seconds / steps

    measured(1)
    step_seconds = measured(_PROBE_STEPS)
    if step_seconds * _PROBE_STEPS < seconds:
        steps = max(1, round(seconds / _MEASUREMENTS / step_seconds))
        step_seconds = statistics.median(measured(steps) for _ in range(_MEASUREMENTS))
    sgd.forget_momentum()
    return step_seconds
