"""What a node answers without a model of its own: which worker it is, and sums of others' models.

Nothing here imports torch at module level: a ClientApp imports this before it knows its device.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import replace

from flwr.app import Context, Message

from ..algorithm.averaging import weighted_average
from ..errors import UsageError
from ..grids.array_records import view_record
from ..grids.devices import WorkerSpec, parse_workers, worker_from_node_config
from ..protocol import SumOrder, SumReport, WorkerProfile


def worker_of(context: Context) -> WorkerSpec:
    """Return the worker that this node is.

    A SuperNode's node config names its device, and may give its speed: ``seconds-per-step`` and
    ``seconds-per-step-alone``. In Flower's simulation there is no node config; the run config's
    ``workers`` is read instead, and node i is its i-th worker.

    UsageError if the device is missing here, a speed is not a number above 0, or there are more
    nodes than workers.
    """
    config = context.node_config
    if "device" in config:
        return replace(
            worker_from_node_config(config),
            seconds_per_step=_given_seconds(config, "seconds-per-step"),
            seconds_per_step_alone=_given_seconds(config, "seconds-per-step-alone"),
        )
    given = context.run_config.get("workers", "auto")
    workers = parse_workers(str(given))
    rank = int(config.get("partition-id", 0))
    if rank >= len(workers):
        raise UsageError(
            f"node {rank} has no worker: workers = {given!r} names {len(workers)}; start "
            f"{len(workers)} SuperNodes (num-supernodes={len(workers)}), or name more workers"
        )
    return workers[rank]


def _given_seconds(node_config: Mapping[str, bool | float | int | str], key: str) -> float | None:
    given = node_config.get(key)
    if given is None:
        return None
    if isinstance(given, bool | str) or not 0 < given < math.inf:
        raise UsageError(
            f"{key} = {given!r} in the node config must be a number above 0; leave "
            "it out to have it measured"
        )
    return float(given)


def profile_of(worker: WorkerSpec, partition_id: int = -1) -> WorkerProfile:
    """Return what a worker says of itself, but for what it measures and for its data and model."""
    return WorkerProfile(
        device=worker.device_with_cores,
        tier=worker.tier,
        name=worker.name,
        partition_id=partition_id,
        steps=worker.steps or 0,
        seconds_per_step=worker.seconds_per_step or 0.0,
        seconds_per_step_alone=worker.seconds_per_step_alone or 0.0,
        batch_size=worker.batch or 0,
        precision=worker.precision,
        role=worker.role,
    )


def answer_profile(
    message: Message,
    context: Context,
    data_fingerprint: str = "",
    seconds_per_step: float = 0.0,
    model_fingerprint: str = "",
) -> Message:
    """Answer the profile query; one line makes any ClientApp known to the strategy.

    ``app.query("profile")(flower_blsgd.answer_profile)``

    The node config may hold ``device``, ``tier``, ``name``, ``partition-id``, ``steps``, ``batch``,
    ``role`` and ``seconds-per-step``, which wins over a measured one.

    Raises
    ------
    UsageError
        If the node config names no worker, or a speed that is none.
    """
    profile = profile_of(worker_of(context), int(context.node_config.get("partition-id", -1)))
    return replace(
        profile,
        seconds_per_step=profile.seconds_per_step or seconds_per_step,
        data_fingerprint=data_fingerprint,
        model_fingerprint=model_fingerprint,
    ).to_reply(message)


def answer_sum(message: Message) -> Message:
    """Reply to an order to sum with the weighted average of its slices, as workers of ``byteps``.

    ProtocolError if the message holds no such order.
    """
    order = SumOrder.from_message(message)
    started_at, start = time.time(), time.perf_counter()
    summed = weighted_average(order.models(), order.weights)
    ended_at = started_at + time.perf_counter() - start
    return SumReport(view_record(summed), started_at, ended_at).to_reply(message)
