"""What this machine has: CPU cores that we may use, and accelerators that torch sees."""

import functools
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError


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

    def check_cores(self, cores: Sequence[int]) -> None:
        """Refuse cores that this process may not use."""
        missing = [core for core in cores if core not in self.cores]
        if missing:
            raise UsageError(
                f"workers: core {missing[0]} of cpu:{missing[0]} is not there; "
                f"this process may use cores {format_ids(self.cores)}"
            )

    def check_accelerator(self, device: str) -> None:
        """Refuse an accelerator that torch does not see; ``"cuda"`` stands for any card."""
        if device in self.accelerators:
            return
        if any(name.partition(":")[0] == device for name in self.accelerators):
            return
        have = ", ".join(["cpu", *self.accelerators])
        raise UsageError(f"workers: device {device} is not there; this machine has {have}")


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
    """Return the processor's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def accelerator_names(machine: Machine) -> tuple[str, ...]:
    """Return the accelerators' names; for those whose name torch does not tell, the device."""
    names = []
    for device in machine.accelerators:
        kind, _, number = device.partition(":")
        if kind == "cuda":
            import torch

            names.append(torch.cuda.get_device_name(int(number)))
        else:
            names.append(device)
    return tuple(names)


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
