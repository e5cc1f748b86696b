"""How much memory is free, so that too much is refused instead of killed."""

import logging
from pathlib import Path

from ..errors import UsageError

_LOG = logging.getLogger(__name__)

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
_MEMINFO = Path("/proc/meminfo")


def free_bytes() -> int | None:
    """Return the bytes that can still be used, also under a container's limit; None if unknown."""
    amounts = (_free_on_machine(), *(_free_in_group(*files) for files in _CGROUPS))
    return min((amount for amount in amounts if amount is not None), default=None)


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


def _free_on_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:  # not Linux
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_in_group(limit: Path, used: Path, statistics: Path) -> int | None:
    try:
        lines = [line.split() for line in statistics.read_text().splitlines()]
        # Pages of files that nobody reads any more: the kernel gives them back when asked.
        names = ("inactive_file", "total_inactive_file")
        cached = max((int(count) for name, count in lines if name in names), default=0)
        return max(0, int(limit.read_text()) - int(used.read_text()) + cached)
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None
