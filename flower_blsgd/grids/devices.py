"""The devices and free memory of this machine, and the grammar that names workers on it.

The grammar is the same in configs, on the command line and for SuperNodes.

Groups separated by ``;``, each ``[N x] DEVICE[:ids]`` and then, in any order, ``fast`` or ``slow``,
``steps=``, ``batch=``, ``precision=``, ``role=``, ``slowdown=``, ``seconds-per-step=``, ``name=``::

    8x cuda:0 fast; 2x cpu:0-15 slow steps=1; 1x cpu:16-19 slowdown=4

DEVICE is a torch device type. For ``cpu`` the ids are cores, which the N workers of a group
split evenly; for an accelerator they are its cards. ``batch`` and ``precision`` are what this
worker computes with instead of the run's: a card with less memory, or of another age. ``slowdown``
makes a worker that many times slower on purpose. ``seconds-per-step`` says how fast it is, at its
own batch, so that nobody measures it. With ``role=evaluate`` it does not train but evaluates the
model while the others train.
"""

import functools
import itertools
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import UsageError

Tier = Literal["", "fast", "slow"]
Role = Literal["train", "evaluate"]

Precision = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

_LARGEST_ID = 9999
_DIGITS = "[0-9]{1,9}"
_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?")
_CPUINFO, _MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_OPTIONS = (
    "fast, slow, steps=N (N >= 1), batch=N (N >= 2), "
    f"precision={'|'.join(PRECISIONS)}, role=train|evaluate, slowdown=X (X >= 1), "
    "seconds-per-step=X or name=TEXT"
)


@dataclass(frozen=True)
class Machine:
    """The devices that workers can be put on.

    Parameters
    ----------
    cores : tuple of int
        CPU cores that this process may run on, ascending.
    given_accelerators : tuple of str, optional
        Torch devices, such as ``("cuda:0", "cuda:1")``; None asks torch when they matter.
    """

    cores: tuple[int, ...]
    given_accelerators: tuple[str, ...] | None = None

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The accelerators; the first look imports torch."""
        if self.given_accelerators is not None:
            return self.given_accelerators
        return _accelerators()

    def has_accelerator(self, device: str) -> bool:
        """Return whether torch sees an accelerator; ``"cuda"`` stands for any card."""
        kinds = {name.partition(":")[0] for name in self.accelerators}
        return device in self.accelerators or device in kinds

    def check(self, worker: "WorkerSpec") -> None:
        """Refuse a worker whose cores or device this process may not use."""
        if missing := [core for core in worker.cores if core not in self.cores]:
            raise UsageError(
                f"workers: core {missing[0]} of cpu:{missing[0]} is not there; "
                f"this process may use cores {format_ids(self.cores)}"
            )
        if worker.device != "cpu" and not self.has_accelerator(worker.device):
            have = ", ".join(["cpu", *self.accelerators])
            raise UsageError(
                f"workers: device {worker.device} is not there; this machine has {have}"
            )


def format_ids(ids: Sequence[int]) -> str:
    """Write ascending numbers briefly.

    >>> format_ids([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


@functools.cache
def this_machine() -> Machine:
    """Return what this process may use. A worker can ask before it imports torch."""
    return Machine(usable_cores())


def cpu_name() -> str:
    """Return the processor's name, as far as the system says."""
    return _said(_CPUINFO, "model name") or platform.processor() or platform.machine()


def _said(file: Path, name: str) -> str:
    """Return the first value of a name in a file of the kernel; empty without it, or Linux."""
    try:
        found = re.search(rf"^{name}\s*:(.*)$", file.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""


def accelerator_names(machine: Machine) -> tuple[str, ...]:
    """Return the accelerators' names; the device where torch does not say."""
    if not machine.accelerators:
        return ()
    import torch

    cuda = torch.cuda.get_device_name
    return tuple(cuda(d) if d.startswith("cuda") else d for d in machine.accelerators)


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on (all of them where there is no affinity)."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


@functools.cache
def _accelerators() -> tuple[str, ...]:
    import torch

    found = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    found += [f"xpu:{i}" for i in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return tuple(found)


# --- memory -----------------------------------------------------------------------------------

_CGROUPS = (
    # (limit, used, statistics), of version 2 and of version 1
    tuple(
        Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current", "memory.stat")
    ),
    tuple(
        Path("/sys/fs/cgroup/memory") / name
        for name in ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    ),
)


def free_bytes() -> int | None:
    """Return the bytes that can still be used, also under a container's limit; None if unknown."""
    on_machine = _said(_MEMINFO, "MemAvailable")  # such as "8123456 kB"
    amounts = [int(on_machine.split()[0]) * 1024] if on_machine else []
    in_groups = (_free_in_group(*files) for files in _CGROUPS)
    return min((*amounts, *(free for free in in_groups if free is not None)), default=None)


def require_bytes(needed: int, what: str, way_out: str = "") -> None:
    """Refuse what would not fit into free memory.

    Raises
    ------
    UsageError
        With how much is needed, what for, how much is free, and the way out.
    """
    free = free_bytes()
    if free is not None and needed > free:
        advice = f"; {way_out}" if way_out else ""
        raise UsageError(
            f"not enough memory: {what} needs {format_bytes(needed)}, but only "
            f"{format_bytes(free)} is free{advice}"
        )


def format_bytes(count: float) -> str:
    """Write a number of bytes for people.

    >>> format_bytes(1_500_000), format_bytes(12)
    ('1.5 MB', '12 bytes')
    """
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def _free_in_group(limit: Path, used: Path, statistics: Path) -> int | None:
    try:
        lines = [line.split() for line in statistics.read_text().splitlines()]
        # Pages of files that nobody reads any more: the kernel gives them back when asked.
        names = ("inactive_file", "total_inactive_file")
        cached = max((int(count) for name, count in lines if name in names), default=0)
        return max(0, int(limit.read_text()) - int(used.read_text()) + cached)
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None


# --- workers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerSpec:
    """One worker: a device, and what the user says about it.

    Parameters
    ----------
    device : str
        A torch device without cores: ``"cpu"``, ``"cuda:0"``, ``"mps"``.
    cores : tuple of int (default: ())
        CPU cores that a ``cpu`` worker is pinned to, ascending.
    tier : {"", "fast", "slow"} (default: "")
        What the user names it; empty leaves it to the speed.
    steps : int, optional
        Local steps per round, fixed by the user.
    slowdown : float (default: 1.0)
        It takes this many times as long as the device would, >= 1.
    name : str (default: "")
        How logs and results call it, and how it is known when it comes back.
    seconds_per_step : float, optional
        Of one step of its batch, with the slowdown; None leaves it to be measured.
    seconds_per_step_alone : float, optional
        The same while nobody else computes, where that is known apart.
    batch : int, optional
        Samples per step of this worker, >= 2; None for the run's batch size.
    precision : {"", "float32", "tf32", "bfloat16"} (default: "")
        What it computes with; empty for the run's precision.
    role : {"train", "evaluate"} (default: "train")
        Whether it trains, or evaluates the model while the others train.
    """

    device: str
    cores: tuple[int, ...] = ()
    tier: Tier = ""
    steps: int | None = None
    slowdown: float = 1.0
    name: str = ""
    seconds_per_step: float | None = None
    seconds_per_step_alone: float | None = None
    batch: int | None = None
    precision: str = ""
    role: Role = "train"

    @property
    def device_with_cores(self) -> str:
        """The device as the grammar writes it: ``"cpu:0-3"``, ``"cuda:1"``."""
        return f"{self.device}:{format_ids(self.cores)}" if self.cores else self.device

    def to_node_config(self) -> dict[str, bool | float | int | str]:
        """Return the node config of a SuperNode that is this worker."""
        said = {
            "tier": self.tier or None,
            "steps": self.steps,
            "batch": self.batch,
            "precision": self.precision or None,
            "slowdown": self.slowdown if self.slowdown != 1.0 else None,
            "name": self.name or None,
            "seconds-per-step": self.seconds_per_step,
            "seconds-per-step-alone": self.seconds_per_step_alone,
            "role": self.role if self.role != "train" else None,
        }
        known = {key: value for key, value in said.items() if value is not None}
        return {"device": self.device_with_cores, **known}


def parse_workers(
    text: str, machine: Machine | None = None, anywhere: bool = False
) -> list[WorkerSpec]:
    """Read a worker specification and check it against a machine.

    Parameters
    ----------
    text : str
        The specification, or ``"auto"``.
    machine : Machine, optional
        What there is; this machine by default.
    anywhere : bool (default: False)
        The devices need not be there: for plans.

    Returns
    -------
    list of WorkerSpec
        One per worker, in the order of the specification.

    Raises
    ------
    UsageError
        If the text cannot be read (the message points at the character), or a device is missing.
    """
    machine = machine or this_machine()
    if text.strip() == "auto":
        return auto_workers(machine)
    text = re.sub(r"\s", " ", text)  # a config may write it over several lines
    parts = [part for part in re.finditer("[^;]+", text) if part[0].strip()]
    groups = [_parse_group(text, part[0], part.start()) for part in parts]
    if not groups:
        raise UsageError(
            f'workers = "{text}" names no worker; try "1x cpu:0 fast; 1x cpu:1 slow" or "auto"'
        )
    workers = _expand(groups, machine)
    for worker in workers if not anywhere else ():
        machine.check(worker)
    for name, count in Counter(worker.name for worker in workers).items():
        if name and count > 1:
            raise UsageError(f'workers: name={name} comes twice in "{text}"; names must differ')
    return workers


def worker_from_node_config(
    node_config: Mapping[str, bool | float | int | str], machine: Machine | None = None
) -> WorkerSpec:
    """Read the worker that a SuperNode is, from ``--node-config "device='cpu:0' tier='fast'"``.

    UsageError if a value cannot be read or the device is missing.
    """
    words = [str(node_config["device"]), str(node_config.get("tier", ""))]
    keys = ("steps", "batch", "precision", "role", "slowdown")
    words += [f"{key}={node_config[key]}" for key in keys if key in node_config]
    workers = parse_workers(" ".join(filter(None, words)), machine)
    if len(workers) != 1:
        raise UsageError(f"device = {node_config['device']!r} must name one worker")
    return replace(workers[0], name=str(node_config.get("name", "")))


def auto_workers(machine: Machine) -> list[WorkerSpec]:
    """Return the workers of ``"auto"``.

    Every accelerator trains, and one CPU worker evaluates on the cores that are left after one per
    accelerator and one for the server; without such a core there is none. Without an accelerator:
    two halves of the cores, the second called slow; a single core carries both. None is slowed on
    purpose.
    """
    cores = machine.cores
    if not machine.accelerators:
        half = (len(cores) + 1) // 2
        return [
            WorkerSpec("cpu", cores[:half], "fast"),
            WorkerSpec("cpu", cores[half:] or cores, "slow"),
        ]
    workers = [WorkerSpec(device, tier="fast") for device in machine.accelerators]
    left = cores[len(workers) + 1 :]
    return [*workers, *([WorkerSpec("cpu", left, role="evaluate")] if left else [])]


def cores_note(workers: Sequence[WorkerSpec], machine: Machine | None = None) -> str:
    """Return a line about CPU cores that several workers share, or that are missing; else empty."""
    owners = Counter(core for worker in workers for core in worker.cores)
    shared = [core for core, count in sorted(owners.items()) if count > 1]
    if shared:
        return f"note: workers share CPU core {format_ids(shared)} and slow one another down"
    machine = machine or this_machine()
    if owners or list(workers) != auto_workers(machine):
        return ""
    return (
        f"note: {len(machine.cores)} CPU cores are too few for a worker that evaluates: each "
        "accelerator needs one, and so does the server"
    )


def split_evenly(ids: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Split ids into consecutive parts that differ by one at most; too few ids are shared.

    >>> split_evenly([0, 1, 2], 2), split_evenly([0, 1], 4)
    ([(0,), (1, 2)], [(0,), (0,), (1,), (1,)])
    """
    begins = [part * len(ids) // parts for part in range(parts + 1)]
    return [tuple(ids[a : max(b, a + 1)]) for a, b in itertools.pairwise(begins)]


@dataclass(frozen=True)
class _Group:
    count: int
    ids: tuple[int, ...]
    worker: WorkerSpec


def _parse_group(text: str, part: str, position: int) -> _Group:
    def refuse(token: str, start: int, expected: str) -> UsageError:
        at = position + start + 1
        return UsageError(
            f'workers: cannot read "{token}" at character {at} of "{text}"; expected {expected}'
        )

    # "8x" and "8 x" both count; a count may stand glued to nothing else.
    head = re.match(r"\s*(?:(\S+?)\s*x\s+)?(?=\S)", part)
    assert head is not None
    count = 1
    if head[1] is not None:
        if not re.fullmatch(_DIGITS, head[1]) or not 1 <= int(head[1]) <= _LARGEST_ID:
            raise refuse(head[1], head.start(1), "a number of workers, such as 2x")
        count = int(head[1])
    words = [(m[0], m.start()) for m in re.compile(r"\S+").finditer(part, head.end())]
    device, start = words[0]
    kind, colon, id_text = device.partition(":")
    if not re.fullmatch(r"[a-z]+", kind):
        raise refuse(device, start, "a device, such as cpu, cpu:0-3 or cuda:0")
    ids = _parse_ids(id_text)
    if ids is None or (colon and not ids):
        raise refuse(id_text, start + len(kind) + 1, "numbers, such as 0, 0-3 or 0,2,4")
    worker = WorkerSpec(kind)
    given: set[str] = set()
    for word, start in words[1:]:
        changed = _option(word)
        if changed is None:
            raise refuse(word, start, _OPTIONS)
        if changed.keys() & given:
            raise refuse(word, start, "each option once")
        given |= changed.keys()
        worker = replace(worker, **changed)
    return _Group(count, ids, worker)


def _parse_ids(text: str) -> tuple[int, ...] | None:
    ids: set[int] = set()
    for part in filter(None, text.split(",")):
        match = re.fullmatch(f"({_DIGITS})(?:-({_DIGITS}))?", part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > _LARGEST_ID:
            return None
        ids.update(range(first, last + 1))
    return tuple(sorted(ids))


def _option(word: str) -> dict[str, Any] | None:
    """Return the parameter of `WorkerSpec` that an option sets; None if it cannot be read."""
    if word in ("fast", "slow"):
        return {"tier": word}
    key, _, value = word.partition("=")
    number = float(value) if _NUMBER.fullmatch(value) else math.nan
    least = {"steps": 1, "batch": 2}.get(key, math.inf)
    if re.fullmatch(_DIGITS, value) and number >= least:
        return {key: int(value)}
    if key == "slowdown" and 1 <= number < math.inf:
        return {"slowdown": number}
    if key == "seconds-per-step" and 0 < number < math.inf:
        return {"seconds_per_step": number}
    known = {"precision": PRECISIONS, "role": get_args(Role)}
    if value and (key == "name" or value in known.get(key, ())):
        return {key: value}
    return None


def _expand(groups: Sequence[_Group], machine: Machine) -> list[WorkerSpec]:
    # CPU workers without cores share what no group claims, in the order of the specification.
    claimed = {core for g in groups if g.worker.device == "cpu" for core in g.ids}
    free = [core for core in machine.cores if core not in claimed] or machine.cores
    unplaced = sum(g.count for g in groups if g.worker.device == "cpu" and not g.ids)
    shares = iter(split_evenly(free, unplaced) if unplaced else [])
    workers = []
    for group in groups:
        if group.worker.device == "cpu":
            own = split_evenly(group.ids, group.count) if group.ids else shares
            cores = itertools.islice(own, group.count)
            members = [replace(group.worker, cores=part) for part in cores]
        else:
            members = [replace(group.worker, device=card) for card in _cards(group)]
        if group.worker.name and group.count > 1:
            members = [replace(w, name=f"{w.name}-{i}") for i, w in enumerate(members)]
        workers += members
    return workers


def _cards(group: _Group) -> list[str]:
    kind = group.worker.device
    names = [f"{kind}:{number}" for number in group.ids] if group.ids else [kind]
    if len(names) > group.count:
        raise UsageError(
            f"workers: {group.count} worker cannot hold {len(names)} devices; "
            f"write {len(names)}x {kind}:{format_ids(group.ids)}"
        )
    return [names[part * len(names) // group.count] for part in range(group.count)]
