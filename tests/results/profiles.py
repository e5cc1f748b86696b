"""Speed profiles made by hand."""

from collections.abc import Sequence
from typing import Any

from flower_blsgd.config import RunConfig
from flower_blsgd.grids.machine import Machine
from flower_blsgd.grids.worker_spec import WorkerSpec
from flower_blsgd.results.speed_profile import (
    SpeedProfile,
    Spread,
    WorkerSpeed,
    profile_key,
    worker_name,
)

MACHINE = Machine((0, 1, 2, 3), given_accelerators=())
WORKERS = [
    WorkerSpec("cpu", (0, 1), tier="fast"),
    WorkerSpec("cpu", (2,), tier="slow", slowdown=4.0),
]


def around(median: float, count: int = 5) -> Spread:
    return Spread(median, 0.5 * median, 2 * median, count)


def made_profile(
    config: RunConfig | None = None,
    workers: Sequence[WorkerSpec] = WORKERS,
    alone: Sequence[float] = (0.01, 0.04),
    loaded: Sequence[float] = (0.02, 0.05),
    overhead: float = 0.001,
    machine: Machine | None = MACHINE,
    **key: Any,
) -> SpeedProfile:
    """Return a profile that holds for these settings and workers, but for the keys given."""
    return SpeedProfile(
        profile_key(config or RunConfig(), machine) | key,
        tuple(
            WorkerSpeed(worker_name(worker), around(a), around(b))
            for worker, a, b in zip(workers, alone, loaded, strict=True)
        ),
        around(overhead),
    )
