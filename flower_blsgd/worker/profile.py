"""A node says which worker it is."""

from flwr.app import Context, Message

from ..errors import UsageError
from ..protocol import WorkerProfile
from ..runtime.devices import WorkerSpec, parse_workers, worker_from_node_config


def worker_of(context: Context) -> WorkerSpec:
    """Return the worker that this node is.

    A SuperNode's node config names its device. In Flower's simulation there is no node config;
    the run config's ``workers`` is read instead, and node i is its i-th worker.

    Raises
    ------
    UsageError
        If the device is missing here, or there are more nodes than workers.
    """
    if "device" in context.node_config:
        return worker_from_node_config(context.node_config)
    workers = parse_workers(str(context.run_config.get("workers", "auto")))
    place = int(context.node_config.get("partition-id", 0))
    if place >= len(workers):
        raise UsageError(
            f"node {place} has no worker: workers = "
            f"{context.run_config.get('workers', 'auto')!r} names {len(workers)}; start "
            f"{len(workers)} SuperNodes (num-supernodes={len(workers)}), or name more workers"
        )
    return workers[place]


def profile_of(
    worker: WorkerSpec,
    partition_id: int = -1,
    seconds_per_step: float = 0.0,
    data_fingerprint: str = "",
) -> WorkerProfile:
    """Return what a worker says of itself."""
    return WorkerProfile(
        device=worker.device_with_cores,
        tier=worker.tier,
        name=worker.name,
        partition_id=partition_id,
        steps=worker.steps or 0,
        seconds_per_step=seconds_per_step,
        data_fingerprint=data_fingerprint,
    )


def answer_profile(message: Message, context: Context, data_fingerprint: str = "") -> Message:
    """Answer the profile query; one line makes any ClientApp known to the strategy.

    ``app.query("profile")(flower_blsgd.answer_profile)``

    The node config may hold ``device``, ``tier``, ``name``, ``partition-id``, ``steps`` and
    ``seconds-per-step``.
    """
    return profile_of(
        worker_of(context),
        partition_id=int(context.node_config.get("partition-id", -1)),
        seconds_per_step=float(context.node_config.get("seconds-per-step", 0.0)),
        data_fingerprint=data_fingerprint,
    ).to_reply(message)
