"""What the tests with real processes share."""

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.engines.local.worker_process import WorkerProcess

from .channels import bytes_of, sum_of

PATIENCE_SECONDS = 60.0
"""Costs nothing when all is well; a machine that has other work may need much of it."""
CLIENT = "foreign_client:app"

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity"
)
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="this system has no /proc"
)


def wait_until(holds: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> bool:
    """Poll until something holds; say whether it came to hold in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that is dead but not yet waited for does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def living(mark: str) -> list[int]:
    """Return the living processes that have this ``NAME=value`` in their environment."""
    name, _, value = mark.partition("=")
    found = psutil.process_iter(["environ"])
    return sorted(p.pid for p in found if (p.info["environ"] or {}).get(name) == value)


def processes_below(parent: int | None = None, helpers: bool = False) -> set[int]:
    """Return what runs below a process, by default this one, without multiprocessing's helpers."""
    found = {process.pid for process in psutil.Process(parent).children(recursive=True)}
    return {pid for pid in found if is_alive(pid) and (helpers or not is_helper(pid))}


def is_helper(pid: int) -> bool:
    """Return whether a process is multiprocessing's fork server or resource tracker."""
    try:
        name, command = psutil.Process(pid).name(), " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
    names = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    return any(helper in command for helper in names) and name != "blsgd-worker"


@dataclass
class Held:
    """What this process holds: processes below it, threads, descriptors, blocks of memory."""

    processes: set[int] = field(default_factory=processes_below)
    threads: int = field(default_factory=threading.active_count)
    descriptors: int = field(default_factory=lambda: len(descriptors()))
    shared: int = field(default_factory=lambda: sum("memfd:" in d for d in descriptors()))

    def more_than(self, before: "Held") -> dict[str, int]:
        """Return what is held now and was not before."""
        more = {
            "processes": len(self.processes - before.processes),
            "threads": self.threads - before.threads,
            "descriptors": self.descriptors - before.descriptors,
            "shared memory": self.shared - before.shared,
        }
        return {name: count for name, count in more.items() if count > 0}


def descriptors() -> list[str]:
    """Return where the open descriptors of this process lead to, but for a library's own files."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of this very listing
            continue
    return [path for path in found if "site-packages" not in path]  # fonts stay open


def left_behind(before: Held) -> dict[str, int]:
    """Return what is held longer than it takes to end; empty if nothing is."""

    def nothing() -> bool:
        gc.collect()
        return not Held().more_than(before)

    wait_until(nothing, 30.0)
    return Held().more_than(before)


def make_grid(
    app_dir: Path,
    workers: Sequence[WorkerSpec] | int = 1,
    client_app: str = CLIENT,
    **run_config: bool | float | int | str,
) -> LocalGrid:
    """Return a grid of the foreign app; a number stands for that many CPU workers."""
    if isinstance(workers, int):
        workers = [WorkerSpec("cpu")] * workers
    return LocalGrid(workers, client_app, app_dir, run_config)


def running(grid: LocalGrid) -> dict[int, WorkerProcess]:
    """Return the process of every node that has one now."""
    found = {node_id: node._process for node_id, node in grid._nodes.items()}
    return {
        node_id: process
        for node_id, process in found.items()
        if process is not None and process.wait(0.0) is None
    }


def process_ids(grid: LocalGrid) -> dict[int, int]:
    """Return the process ids of `running`."""
    return {node_id: process.pid for node_id, process in running(grid).items()}


def shared_bytes(grid: LocalGrid) -> int:
    """Return the bytes of all shared buffers for messages that exist now, here and there."""
    attached = (process._channel.attached.values() for process in running(grid).values())
    return bytes_of(grid._pool) + sum(map(sum_of, attached))


def order(node_id: int = 100, do: str = "echo", **values: object) -> Message:
    """Return a train message; keyword arguments with an underscore become keys with a dash."""
    record = {key.replace("_", "-"): value for key, value in values.items()}
    content = RecordDict({"order": ConfigRecord({"do": do, **record})})
    return Message(content, node_id, "train", group_id="7")


def query(node_id: int = 100) -> Message:
    return Message(RecordDict(), node_id, "query")


def ask(grid: LocalGrid, *messages: Message, timeout: float = PATIENCE_SECONDS) -> list[Message]:
    """Send messages and return the replies; each must come."""
    replies = list(grid.send_and_receive(messages, timeout=timeout))
    assert len(replies) == len(messages), f"{len(replies)} replies to {len(messages)} messages"
    return replies


def ask_one(grid: LocalGrid, message: Message, timeout: float = PATIENCE_SECONDS) -> Message:
    return ask(grid, message, timeout=timeout)[0]


def answer_of(reply: Message) -> ConfigRecord:
    """Return what a handler answered."""
    assert not reply.has_error(), reply.error.reason
    return reply.content["answer"]


def report(grid: LocalGrid, node_id: int = 100) -> ConfigRecord:
    """Ask a worker what its process is."""
    return answer_of(ask_one(grid, query(node_id)))
