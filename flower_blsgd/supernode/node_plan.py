"""Which SuperNodes to start, and how: worker specification in, command lines out."""

import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import UsageError
from ..runtime.devices import WorkerSpec
from ..runtime.pinning import environment
from .keys import FLAG as KEY_FLAG
from .node_config import Value, node_config_text
from .superlink import SuperLinkAddress

OUR_KEYS = (
    *("device", "devices", "tier", "steps", "slowdown", "name"),
    *("seconds-per-step", "seconds-per-step-alone", "superlink"),
)
"""The node config's keys that the command writes."""

LOOPBACK = "127.0.0.1"
_PROGRAM = "flower-supernode"


@dataclass(frozen=True)
class NodePlan:
    """One SuperNode.

    Parameters
    ----------
    workers : tuple of WorkerSpec
        One, or the several devices behind this node.
    devices : str (default: "")
        Their specification, if they are several.
    name : str (default: "")
        How it is known when it comes back.
    """

    workers: tuple[WorkerSpec, ...]
    devices: str = ""
    name: str = ""

    @property
    def label(self) -> str:
        """How the command calls it."""
        return self.name or self.devices or self.workers[0].device_with_cores

    @property
    def cores(self) -> tuple[int, ...]:
        """The cores that its processes keep to; empty: all, as with an accelerator."""
        if not all(worker.cores for worker in self.workers):
            return ()
        return tuple(sorted({core for worker in self.workers for core in worker.cores}))

    def node_config(self, superlink: SuperLinkAddress) -> dict[str, Value]:
        """Return the node config that makes a SuperNode this one."""
        if not self.devices:
            described: dict[str, Value] = self.workers[0].to_node_config()
        else:
            described = {"devices": self.devices}
        if self.name:
            described["name"] = self.name
        return {**described, "superlink": str(superlink)}

    def variables(self) -> dict[str, str]:
        """Return what its environment has beside ours.

        Several devices behind one node are pinned, each by its own process, when they start.
        """
        return {} if self.devices else environment(self.workers[0])


@dataclass(frozen=True)
class NodeLaunch:
    """A SuperNode that is ready to be started.

    Parameters
    ----------
    label : str
        How the command calls it; no two are called the same.
    command : tuple of str
        Program and arguments.
    cores : tuple of int
        What it is pinned to; empty: nothing.
    environment : mapping
        All its variables.
    superlink : str
        ``HOST:PORT``, for messages.
    key : Path, optional
        Its private key, for messages.
    port : int
        Of its Runtime API on the loopback interface, for messages.
    """

    label: str
    command: tuple[str, ...]
    cores: tuple[int, ...]
    environment: Mapping[str, str] = field(repr=False)
    superlink: str
    key: Path | None
    port: int


def plan_nodes(
    workers: Sequence[WorkerSpec], specification: str, one_node_per_device: bool, name: str = ""
) -> list[NodePlan]:
    """Return one node with all workers, or one for each.

    Parameters
    ----------
    workers : sequence of WorkerSpec
        At least one.
    specification : str
        What they were read from, in the grammar of `runtime.devices`.
    one_node_per_device : bool
        A node for each.
    name : str (default: "")
        Of the node; several get a number behind it.

    Raises
    ------
    UsageError
        If a worker and the node are both named.
    """
    if len(workers) > 1 and not one_node_per_device:
        return [NodePlan(tuple(workers), " ".join(specification.split()), name)]
    named = next((worker.name for worker in workers if worker.name), "")
    if name and named:
        raise UsageError(f"--name {name}: the worker is named name={named} already; name it once")
    nodes = []
    for number, worker in enumerate(workers):
        own = worker.name or (f"{name}-{number}" if name and len(workers) > 1 else name)
        nodes.append(NodePlan((replace(worker, name=own),), name=own))
    return nodes


def launches(
    nodes: Sequence[NodePlan],
    superlink: SuperLinkAddress,
    root_certificates: Path | None,
    keys: Sequence[Path | None],
    ports: Sequence[int],
    further_config: Mapping[str, Value],
    further_flags: Sequence[str],
) -> list[NodeLaunch]:
    """Return the command line and the environment of each node.

    Parameters
    ----------
    nodes, keys, ports : sequence
        The i-th node with its key (or None) and the port of its Runtime API.
    superlink : SuperLinkAddress
        Where the SuperLink is.
    root_certificates : Path, optional
        What verifies it; None: no TLS.
    further_config : mapping
        Keys of the node config that we know nothing of.
    further_flags : sequence of str
        Handed to flower-supernode as they are.
    """
    secure = ["--root-certificates", str(root_certificates)] if root_certificates else []
    found = []
    labels = _distinct([node.label for node in nodes])
    for node, label, key, port in zip(nodes, labels, keys, ports, strict=True):
        config = node_config_text({**node.node_config(superlink), **further_config})
        command = [
            *[_program(), "--superlink", str(superlink), *(secure or ["--insecure"])],
            *([KEY_FLAG, str(key)] if key else []),
            *["--host", LOOPBACK, "--port", str(port), "--node-config", config],
            *further_flags,
        ]
        found.append(
            NodeLaunch(
                label, tuple(command), node.cores, _environment(node), str(superlink), key, port
            )
        )
    return found


def _distinct(labels: Sequence[str]) -> list[str]:
    counts = Counter(labels)
    return [
        label if counts[label] == 1 else f"{label} #{labels[:place].count(label) + 1}"
        for place, label in enumerate(labels)
    ]


def _program() -> str:
    """Return Flower's program of this very environment: the apps import what is here."""
    beside = Path(sys.executable).with_name(_PROGRAM)
    if not beside.exists():
        raise UsageError(
            f"{_PROGRAM} is not beside {sys.executable}; install flwr in the same environment"
        )
    return str(beside)


def _environment(node: NodePlan) -> dict[str, str]:
    # flower-supernode looks for flower-superexec, and that for flwr-clientapp, in PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    defaults = {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "PYTHONUNBUFFERED": "1"}
    return {**defaults, **os.environ, **node.variables(), "PATH": path}


def free_ports(count: int, first: int | None = None) -> list[int]:
    """Return ports of the loopback interface that nobody listens on: any, or from `first` on.

    Raises
    ------
    UsageError
        If one of those that were asked for is taken.
    """
    wanted = [0] * count if first is None else range(first, first + count)
    ports = []
    with contextlib.ExitStack() as open_sockets:  # all open at once, so that they differ
        for port in wanted:
            probe = open_sockets.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", "") or "above 65535"
                raise UsageError(
                    f"--port {port} cannot be used ({reason}); name another, or leave --port out "
                    "for a free one"
                ) from None
            ports.append(int(probe.getsockname()[1]))
    return ports
