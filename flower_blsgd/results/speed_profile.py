"""Measured speeds on disk: the file format, and for which machine, workers and model it holds."""

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
from .folder import why_not_writable, written_whole

_FORMAT = 1


@dataclass(frozen=True)
class Spread:
    """Several measurements of one time: median, lowest and highest in seconds, and how many.

    ValueError, TypeError or OverflowError if these are no such numbers.
    """

    median: float
    low: float
    high: float
    count: int

    def __post_init__(self) -> None:
        in_order = 0 <= self.low <= self.median <= self.high and math.isfinite(self.high)
        if not in_order or type(self.count) is not int or self.count < 1:
            raise ValueError("no such times")


@dataclass(frozen=True)
class WorkerSpeed:
    """One worker's seconds per step of its batch, its slowdown included.

    Parameters
    ----------
    device : str
        With its cores, such as ``"cpu:0-3"``.
    slowdown : float
        As in the worker specification.
    alone, loaded : Spread
        While no other worker computes, and while all do.
    batch : int, optional
    precision : str (default: "")
        As in the worker specification.
    """

    device: str
    slowdown: float
    alone: Spread
    loaded: Spread
    batch: int | None = None
    precision: str = ""

    @classmethod
    def of(cls, worker: WorkerSpec, alone: Spread, loaded: Spread) -> "WorkerSpeed":
        """Return the speed of a worker."""
        own = worker.batch_size or None, worker.precision
        return cls(worker.device_with_cores, worker.slowdown, alone, loaded, *own)

    @property
    def name(self) -> str:
        """What it holds for, as the worker specification has it."""
        parts = {"batch": self.batch, "precision": self.precision}
        given = [f"{key}={value}" for key, value in parts.items() if value]
        given += [f"slowdown={self.slowdown:g}"] if self.slowdown != 1 else []
        return " ".join([self.device, *given])

    def __post_init__(self) -> None:
        known = isinstance(self.device, str) and self.slowdown > 0 and math.isfinite(self.slowdown)
        known &= type(self.batch) in (int, type(None)) and isinstance(self.precision, str)
        if not known or not self.alone.median * self.loaded.median > 0:
            raise ValueError("no such speed")


ProfileKey = dict[str, Any]
"""What the speeds depend on, by name: they hold for nothing else."""

_SETTINGS = (
    *("task", "model", "batch_size", "threads", "optimizer", "precision", "channels_last"),
    *("compile", "cuda_graph", "micro_batch_size", "clip_norm", "max_tokens"),
)


def profile_key(config: RunConfig, machine: Machine | None = None) -> ProfileKey:
    """Return the key of a run with these settings on this machine."""
    machine = machine or this_machine()
    return {
        "cpu": cpu_name(),
        "cores": len(machine.cores),
        "accelerators": list(accelerator_names(machine)),
        **{name: getattr(config, name) for name in _SETTINGS},
    }


@dataclass(frozen=True)
class SpeedProfile:
    """The speeds and the overhead that `calibrate` measured.

    Parameters
    ----------
    key : dict
        What it holds for, see `profile_key`.
    workers : tuple of WorkerSpeed
        In the order of the worker specification.
    overhead_seconds : Spread
        Of one round: what it takes beside the longest worker's computing.
    """

    key: ProfileKey
    workers: tuple[WorkerSpeed, ...]
    overhead_seconds: Spread

    def write(self, path: Path) -> None:
        """Write the profile, whole or not at all; UsageError if it cannot be written there."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as part:
                part.write_text(text)
        except OSError as error:
            raise UsageError(
                f"profile = {str(path)!r} cannot be written: {error.strerror}"
            ) from None

    @classmethod
    def read(cls, path: Path) -> "SpeedProfile":
        """Read a profile; UsageError if there is none, or the file holds something else."""
        try:
            values = json.loads(path.read_text())
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
        """Return why this profile does not hold here, in words; empty if it does."""
        for name, value in key.items():
            if (measured := self.key[name]) != value:
                setting = name.replace("_", "-")
                return f"it was measured with {setting} = {measured!r}, and here it is {value!r}"
        theirs = ", ".join(speed.name for speed in self.workers)
        any_time = Spread(1, 1, 1, 1)
        ours = ", ".join(WorkerSpeed.of(worker, any_time, any_time).name for worker in workers)
        if theirs != ours:
            return f"it holds the speeds of {theirs}, and the workers are {ours}"
        return ""

    def given_to(self, workers: Sequence[WorkerSpec], clock: Clock) -> list[WorkerSpec]:
        """Return the workers with these speeds: on the wall clock those under load.

        A worker whose speed was given keeps it: it may stand for hardware that is not here.
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
    """Raise UsageError if a profile cannot be written there; writes nothing."""
    reason = "it is a folder" if path.is_dir() else why_not_writable(path.absolute().parent)
    if reason:
        raise UsageError(f"profile = {str(path)!r} cannot be written: {reason}")


def with_profile(
    workers: Sequence[WorkerSpec], config: RunConfig
) -> tuple[list[WorkerSpec], SpeedProfile | None]:
    """Return the workers with the speeds of the settings' profile, and the profile if there is one.

    UsageError if it cannot be read, or holds for something else.
    """
    if not config.profile:
        return list(workers), None
    profile = SpeedProfile.read(Path(config.profile))
    if reason := profile.mismatch(profile_key(config), workers):
        raise UsageError(
            f"profile = {config.profile!r} does not hold here: {reason}; measure with "
            "blsgd calibrate, or leave profile empty"
        )
    return profile.given_to(workers, config.clock), profile
