"""The workers behind one node, from its node config."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import UsageError
from ..runtime.devices import WorkerSpec, parse_workers
from ..runtime.machine import Machine

DEVICES = "devices"

_OF_ONE_WORKER = (
    "device",
    "tier",
    "steps",
    "slowdown",
    "seconds-per-step",
    "seconds-per-step-alone",
)

NodeConfig = Mapping[str, bool | float | int | str]


def host_workers(node_config: NodeConfig, machine: Machine | None = None) -> list[WorkerSpec]:
    """Return the workers of a node with ``devices='4x cuda:0; 2x cpu'``.

    Where the node has a name, that of each begins with it: ``box-1/0``, or ``box-1/quick`` for
    one with a name of its own.

    Raises
    ------
    UsageError
        If the text cannot be read, a device is missing, or another key contradicts it.
    """
    for key in _OF_ONE_WORKER:
        if key in node_config:
            raise UsageError(
                f"{key} = {node_config[key]!r} in the node config does not go with devices = "
                f"{node_config[DEVICES]!r}; write it into the group that it is for"
            )
    try:
        workers = parse_workers(str(node_config[DEVICES]), machine)
    except UsageError as error:
        raise UsageError(f"devices in the node config: {error}") from None
    name = str(node_config.get("name", ""))
    return _named(workers, name) if name else workers


def _named(workers: Sequence[WorkerSpec], name: str) -> list[WorkerSpec]:
    digits = len(str(len(workers) - 1))  # so that names sort as the places do
    return [
        replace(worker, name=f"{name}/{worker.name or f'{place:0{digits}d}'}")
        for place, worker in enumerate(workers)
    ]
