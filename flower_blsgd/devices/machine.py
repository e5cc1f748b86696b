"""The devices, cores and free memory of this machine."""

import functools
import os
import platform
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import filesize

from ..errors import UsageError

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")

_HIP = "HIP_VISIBLE_DEVICES"
"""AMD's variable, which takes precedence on its cards."""


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
        """Return whether torch sees a worker's accelerator; ``"cuda"`` matches any card."""
        kinds = {name.partition(":")[0] for name in self.accelerators}
        return torch_device(device) in self.accelerators or device in kinds

    def problem(self, device: str) -> str:
        """Return why torch cannot compute on an accelerator, in one line; empty if it can."""
        return "" if self.given_accelerators is not None else accelerator_of(device).problem

    @property
    def usable_accelerators(self) -> tuple[str, ...]:
        """The accelerators on which torch can compute."""
        return tuple(device for device in self.accelerators if not self.problem(device))


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

    found = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if found is None or count == 0:
        return ()
    if found.type == "mps":
        return ("mps",)
    if found.type == "cuda":  # which counts one MIG device in a process, although several are named
        count = max(count, len(_mig_devices()))
    return tuple(f"{found.type}:{i}" for i in range(count))


OWN_DEVICE = "BLSGD_OWN_DEVICE"
"""Environment variable of a process that sees one card: the name of the card in the run."""


def torch_device(device: str) -> str:
    """Return a worker's device as torch names it in this process, which may see one card only."""
    return "cuda:0" if device == os.environ.get(OWN_DEVICE) else device


def visible_card(device: str, alone: bool = True) -> dict[str, str]:
    """Return the environment of a worker's process that sees only its own card, as ``cuda:0``.

    A CPU worker sees no card. Unless `alone`, all cards are visible to the others, except MIG
    devices, of which a process can see only one.
    """
    kind, _, number = device.partition(":")
    if kind == "cpu":
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        return hidden | ({_HIP: "-1"} if _HIP in os.environ else {})
    if kind != "cuda" or not (number or "0").isdigit() or not (alone or len(_mig_devices()) > 1):
        return {}
    index = int(number or 0)
    variable, cards = _visible_cards()
    own = cards[index : index + 1] if variable in os.environ else [str(index)]
    return {variable: "".join(own), OWN_DEVICE: device}


def _visible_cards() -> tuple[str, list[str]]:
    """Return a variable and its indices, UUIDs or MIG names of cards; unset, all are visible."""
    variable = _HIP if _HIP in os.environ else "CUDA_VISIBLE_DEVICES"
    entries = os.environ.get(variable, "").split(",")
    return variable, [entry.strip() for entry in entries if entry.strip()]


def _mig_devices() -> list[str]:
    return [name for name in _visible_cards()[1] if name.startswith("MIG-")]


@dataclass(frozen=True)
class Accelerator:
    """Properties of an accelerator, as torch reports them.

    `memory_bytes` is 0 if unknown. `capability` is that of CUDA, and empty on other devices.
    `problem` is one line on why this torch cannot compute on it; empty if it can.
    """

    name: str
    memory_bytes: int = 0
    capability: tuple[int, ...] = ()
    problem: str = ""

    @property
    def has_bfloat16(self) -> bool:
        """Whether a CUDA card computes in bfloat16; older cards only emulate it."""
        return self.capability >= (8, 0)


@functools.cache
def accelerator_of(device: str) -> Accelerator:
    """Return the properties of a torch device; those of a CUDA card initialise CUDA."""
    import torch

    module = torch.get_device_module(device)
    index = torch.device(torch_device(device)).index or 0
    if not hasattr(module, "get_device_properties") or index >= module.device_count():
        return Accelerator(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch describes an unsupported card in many lines
        its = module.get_device_properties(index)
    if torch.version.cuda is None or not device.startswith("cuda"):
        return Accelerator(its.name, its.total_memory)
    problem = kernel_problem((its.major, its.minor), torch.cuda.get_arch_list())
    problem = problem and f"{device} ({its.name}, {its.major}.{its.minor}) {problem}"
    return Accelerator(its.name, its.total_memory, (its.major, its.minor), problem)


def kernel_problem(capability: tuple[int, int], architectures: Sequence[str]) -> str:
    """Return why torch has no kernels for a card, from the architectures it was built for.

    Binaries (``sm_86``) run on the same major version, if the minor version is not lower, and PTX
    (``compute_90``) on all later cards; with the suffix ``a``, on this capability only.
    """
    built = []
    for kind, major, minor, suffix in re.findall(_ARCHITECTURE, " ".join(architectures)):
        least = int(major), int(minor)
        later = capability >= least and (kind == "compute" or capability[0] == least[0])
        if capability == least or (later and suffix != "a"):
            return ""
        built.append(least)
    if not built:
        return ""
    numbers = "up to {}.{}".format(*max(built))
    advice = "install a newer one"
    if capability < min(built):
        numbers = "{}.{} and newer".format(*min(built))
        advice = f"install torch from {_OLD_CARDS}"
    return f"is not supported by this torch ({numbers}); {advice}"


_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([a-z]?)")
_OLD_CARDS = "https://download.pytorch.org/whl/cu126"


def cpu_name() -> str:
    """Return the name of the processor, or its architecture if the system does not report one."""
    return _value_in(_CPUINFO, "model name") or platform.processor() or platform.machine()


def accelerator_names(machine: Machine) -> tuple[str, ...]:
    """Return the product names of the accelerators."""
    return tuple(accelerator_of(device).name for device in machine.accelerators)


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
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Folder, limit and used bytes, of version 2 and of version 1."""


def free_bytes() -> int | None:
    """Return the bytes of free memory, within a container's limit; None if unknown."""
    on_machine = _value_in(_MEMINFO, "MemAvailable")  # such as "8123456 kB"
    amounts = [int(on_machine.split()[0]) * 1024] if on_machine else []
    in_groups = (_free_in_group(*group) for group in _CGROUPS)
    return min((*amounts, *(free for free in in_groups if free is not None)), default=None)


def require_bytes(needed: int, what: str, advice: str = "") -> None:
    """Raise UsageError if `needed` bytes are not free.

    The message has `what` needs them, how much is needed and free, and the `advice`.
    """
    free = free_bytes()
    if free is not None and needed > free:
        hint = f"; {advice}" if advice else ""
        raise UsageError(
            f"not enough memory: {what} needs {filesize.decimal(needed)}, but only "
            f"{filesize.decimal(free)} is free{hint}"
        )


def _free_in_group(group: Path, limit: str, used: str) -> int | None:
    try:
        lines = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
        # Cached pages of files that are no longer read: the kernel reclaims them on demand.
        names = ("inactive_file", "total_inactive_file")
        cached = max((int(count) for name, count in lines if name in names), default=0)
        limit, used = ((group / name).read_text() for name in (limit, used))
        return max(0, int(limit) - int(used) + cached)
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None


def _value_in(file: Path, name: str) -> str:
    """Return the first value of a name in a /proc file; empty if the name or file is missing."""
    try:
        found = re.search(rf"^{name}\s*:(.*)$", file.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
