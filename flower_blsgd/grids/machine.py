"""The devices, cores and free memory of this machine."""

import functools
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError

_CPUINFO, _MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")


@dataclass(frozen=True)
class Machine:
    """The devices that workers can use.

    `cores` are the CPU cores that this process may run on, ascending. `given_accelerators` are
    torch devices, such as ``("cuda:0", "cuda:1")``; None queries torch on first use.
    """

    cores: tuple[int, ...]
    given_accelerators: tuple[str, ...] | None = None

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The accelerators as torch devices. The first query imports torch."""
        if self.given_accelerators is not None:
            return self.given_accelerators
        return _accelerators()

    def has_accelerator(self, device: str) -> bool:
        """Return whether torch sees an accelerator; ``"cuda"`` matches any card."""
        kinds = {name.partition(":")[0] for name in self.accelerators}
        return device in self.accelerators or device in kinds


@functools.cache
def this_machine() -> Machine:
    """Return the devices that this process may use, without importing torch."""
    return Machine(usable_cores())


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on: all cores on systems without affinity."""
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


def cpu_name() -> str:
    """Return the name of the processor, or its architecture if the system does not report one."""
    return _value_in(_CPUINFO, "model name") or platform.processor() or platform.machine()


def accelerator_names(machine: Machine) -> tuple[str, ...]:
    """Return the product names of CUDA cards, and the torch devices of other accelerators."""
    if not machine.accelerators:
        return ()
    import torch

    cuda = torch.cuda.get_device_name
    return tuple(cuda(d) if d.startswith("cuda") else d for d in machine.accelerators)


def format_ids(ids: Sequence[int]) -> str:
    """Write ascending numbers as ranges.

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
    """Return the bytes of free memory, within a container's limit; None if unknown."""
    on_machine = _value_in(_MEMINFO, "MemAvailable")  # such as "8123456 kB"
    amounts = [int(on_machine.split()[0]) * 1024] if on_machine else []
    in_groups = (_free_in_group(*files) for files in _CGROUPS)
    return min((*amounts, *(free for free in in_groups if free is not None)), default=None)


def require_bytes(needed: int, what: str, advice: str = "") -> None:
    """Raise UsageError if `needed` bytes are not free.

    The message has `what` needs them, how much is needed and free, and the `advice`.
    """
    free = free_bytes()
    if free is not None and needed > free:
        raise UsageError(
            f"not enough memory: {what} needs {format_bytes(needed)}, but only "
            f"{format_bytes(free)} is free{f'; {advice}' if advice else ''}"
        )


def format_bytes(count: float) -> str:
    """Write a number of bytes with a unit.

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
        # Cached pages of files that are no longer read: the kernel reclaims them on demand.
        names = ("inactive_file", "total_inactive_file")
        cached = max((int(count) for name, count in lines if name in names), default=0)
        return max(0, int(limit.read_text()) - int(used.read_text()) + cached)
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None


def _value_in(file: Path, name: str) -> str:
    """Return the first value of a name in a /proc file; empty if the name or file is missing."""
    try:
        found = re.search(rf"^{name}\s*:(.*)$", file.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
