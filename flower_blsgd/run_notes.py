"""What a run on somebody else's grid says about its nodes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from flwr.serverapp import Grid

from .config import RunConfig
from .errors import UsageError
from .results.report import RunReport
from .roster import Roster
from .runtime.devices import WorkerSpec, parse_workers
from .worker.profile import profile_of


def tell_ignored_workers(config: RunConfig, roster: Roster, report: RunReport) -> None:
    """SuperNodes name their own device; only Flower's simulation reads ``workers``."""
    if config.profile:
        report.say(
            f'profile = "{config.profile}" is ignored: only blsgd run reads it; give each node '
            "seconds-per-step in its node config"
        )
    if config.workers == "auto":
        return
    try:
        named = [profile_of(worker) for worker in parse_workers(config.workers)]
    except UsageError:  # devices of another machine
        named = []
    for worker in roster.workers:
        place = worker.profile.partition_id  # simulation gives every node one
        profile = replace(
            worker.profile, partition_id=-1, data_fingerprint="", model_fingerprint=""
        )
        if place < 0 or profile not in named[place : place + 1]:
            report.say(
                f'workers = "{config.workers}" is ignored: each SuperNode names its own device'
            )
            return


def tell_replicas(config: RunConfig, workers: Sequence[WorkerSpec], report: RunReport) -> None:
    """Say where ``replicas = "batched"`` has no effect.

    Parameters
    ----------
    config : RunConfig
        The settings.
    workers : sequence of WorkerSpec
        Those of the local grid; empty on any other.
    report : RunReport
        Where to tell.
    """
    if config.replicas != "batched":
        return
    if not workers:
        report.say(
            'replicas = "batched" acts on nodes with several workers on one accelerator only '
            "(devices in their node config)"
        )
        return
    sharing = Counter(w.device for w in workers if w.device != "cpu" and w.slowdown == 1.0)
    if all(count <= config.processes_per_device for count in sharing.values()):
        report.say(
            'replicas = "batched" has no effect here: no two workers share a process on an '
            "accelerator (on a CPU they take turns)"
        )


def tell_transport(grid: Grid, report: RunReport) -> None:
    """Say how the nodes are reached, where the grid knows more than one way."""
    transports = Counter(getattr(grid, "transports", {}).values())
    if transports:
        ways = ", ".join(f"{count} by {way}" for way, count in sorted(transports.items()))
        report.say(f"nodes: {ways}")


def tell_wire_errors(grid: Grid, report: RunReport) -> None:
    """Say how far the nodes' models were from the true ones, where they travelled in 16 bits."""
    for name, error in getattr(grid, "wire_errors", {}).items():
        report.say(
            f"{name} travelled as {report.config.wire_dtype}: on the nodes they were "
            f"{100 * error:.2g} % off the true ones (root mean square, mean of all rounds)"
        )
