"""Measured speeds on disk: the file format, and the machine, workers and model it applies to."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..algorithm.local_steps import Clock
from ..config import RunConfig
from ..errors import UsageError
from ..grids.machine import Machine, accelerator_names, cpu_name, this_machine
from ..grids.worker_spec import WorkerSpec
from .folder import refused, why_not_writable, write_text

_FORMAT = 2


@dataclass(frozen=True)
class Spread:
    """Several measurements of one time: median, lowest and highest in seconds, and their number.

    ValueError, TypeError or OverflowError if the numbers are invalid.
    """

    median: float
    low: float
    high: float
    count: int

    def __post_init__(self) -> None:
        in_order = 0 <= self.low <= self.median <= self.high and math.isfinite(self.high)
        if not in_order or type(self.count) is not int or self.count < 1:
            raise ValueError("needs 0 <= low <= median <= high and count >= 1")


@dataclass(frozen=True)
class WorkerSpeed:
    """Seconds per step of one worker with its batch, its slowdown included.

    `worker` is its `worker_name`. `alone` is measured while no other worker computes, `loaded`
    while all workers do.
    """

    worker: str
    alone: Spread
    loaded: Spread

    def __post_init__(self) -> None:
        if not isinstance(self.worker, str) or not self.alone.median * self.loaded.median > 0:
            raise ValueError("needs a worker and times above 0")


def worker_name(worker: WorkerSpec) -> str:
    """Return the device and those options that a speed depends on: ``"cpu:0-3 slowdown=4"``."""
    given = worker.given_options()
    options = {key: given[key] for key in ("batch", "precision", "slowdown") if key in given}
    texts = [f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in options.items()]
    return " ".join([worker.device_with_cores, *texts])


ProfileKey = dict[str, Any]
"""Everything that speeds depend on, by name."""

_SETTINGS = (
    *("task", "model", "batch_size", "threads", "optimizer", "precision", "channels_last"),
    *("compile", "loader_workers", "micro_batch_size", "clip_norm", "max_tokens"),
    *("image_size", "lora_rank"),
)


def profile_key(config: RunConfig, machine: Machine | None = None) -> ProfileKey:
    """Return the key of a run with these settings on this machine."""
    machine, config = machine or this_machine(), config.with_absolute_paths()
    return {
        "cpu": cpu_name(),
        "cores": len(machine.cores),
        "accelerators": list(accelerator_names(machine)),
        **{name: getattr(config, name) for name in _SETTINGS},
    }


@dataclass(frozen=True)
class SpeedProfile:
    """The speeds and the overhead that `calibrate` measured.

    `key` is that of `profile_key`. The workers are in the order of the worker specification.
    `overhead_seconds` is the time of a round in addition to the computing of its slowest worker.
    """

    key: ProfileKey
    workers: tuple[WorkerSpeed, ...]
    overhead_seconds: Spread

    def write(self, path: Path) -> None:
        """Write the profile, whole or not at all; UsageError if that is impossible."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n"
        with refused(f"profile = {str(path)!r} cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)

    @classmethod
    def read(cls, path: Path) -> "SpeedProfile":
        """Read a profile; UsageError if the file is missing or holds something else."""
        try:
            values = json.loads(path.read_bytes())  # with or without a byte order mark
            if values["format"] != _FORMAT:
                raise ValueError("another format")
            names = ("cpu", "cores", "accelerators", *_SETTINGS)
            key = {name: values["key"][name] for name in names}
            workers = tuple(
                WorkerSpeed(**{**w, "alone": Spread(**w["alone"]), "loaded": Spread(**w["loaded"])})
                for w in values["workers"]
            )
            return cls(key, workers, Spread(**values["overhead_seconds"]))
        except OSError as error:
            raise UsageError(
                f"profile = {str(path)!r} cannot be read: {error.strerror}; blsgd calibrate "
                "writes one"
            ) from None
        except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError):
            raise UsageError(
                f"profile = {str(path)!r} is not a speed profile; blsgd calibrate writes one"
            ) from None

    def mismatch(self, key: ProfileKey, workers: Sequence[WorkerSpec]) -> str:
        """Return why this profile does not apply; empty if it does."""
        for name, value in key.items():
            if (measured := self.key[name]) != value:
                setting = name.replace("_", "-")
                return f"it was measured with {setting} = {measured!r}, not {value!r}"
        theirs = ", ".join(speed.worker for speed in self.workers)
        ours = ", ".join(map(worker_name, workers))
        if theirs != ours:
            return f"it has the speeds of {theirs}, not of {ours}"
        return ""

    def given_to(self, workers: Sequence[WorkerSpec], clock: Clock) -> list[WorkerSpec]:
        """Return the workers with these speeds, on the wall clock with those under load.

        A worker with a given speed keeps it, since it may represent hardware that is not here.
        """
        return [
            worker
            if worker.seconds_per_step
            else replace(
                worker,
                seconds_per_step=(speed.alone if clock == "device" else speed.loaded).median,
                seconds_per_step_alone=speed.alone.median,
            )
            for worker, speed in zip(workers, self.workers, strict=True)
        ]


def refuse_unwritable(path: Path) -> None:
    """Raise UsageError if a profile cannot be written to a path; write nothing."""
    reason = "it is a folder" if path.is_dir() else why_not_writable(path.absolute().parent)
    if reason:
        raise UsageError(f"profile = {str(path)!r} cannot be written: {reason}")


def with_profile(
    workers: Sequence[WorkerSpec], config: RunConfig
) -> tuple[list[WorkerSpec], SpeedProfile | None]:
    """Return the workers with the speeds of the settings' profile, and the profile, if any.

    UsageError if it cannot be read or does not apply.
    """
    if not config.profile:
        return list(workers), None
    profile = SpeedProfile.read(Path(config.profile))
    if reason := profile.mismatch(profile_key(config), workers):
        raise UsageError(
            f"profile = {config.profile!r} does not apply: {reason}; measure with "
            "blsgd calibrate, or leave profile empty"
        )
    return profile.given_to(workers, config.clock), profile
