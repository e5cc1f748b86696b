"""Measured speeds on disk: for which machine, workers and model they hold."""

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..algorithm.local_steps import Clock
from ..config import RunConfig
from ..errors import UsageError
from ..runtime.devices import WorkerSpec
from ..runtime.machine import Machine, this_machine

_FORMAT = 1


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing.

    Parameters
    ----------
    median, low, high : float
        Seconds.
    count : int
        How many there were.
    """

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class WorkerSpeed:
    """One worker's seconds per step, with its slowdown.

    Parameters
    ----------
    device : str
        With its cores, such as ``"cpu:0-3"``.
    slowdown : float
        On purpose.
    alone, loaded : Spread
        While nobody else computes, and while all do.
    """

    device: str
    slowdown: float
    alone: Spread
    loaded: Spread


@dataclass(frozen=True)
class ProfileKey:
    """What the speeds depend on: they hold for nothing else.

    Parameters
    ----------
    cpu : str
        The processor's name.
    cores : int
        That this process may use.
    accelerators : tuple of str
        Their names.
    task, model : str
        What is trained.
    batch_size : int
        B.
    threads : int
        Of each worker; 0 for one per core.
    processes_per_device : int
        As in the settings.
    optimizer : str
        Of the local steps.
    precision : str
        Of the arithmetic.
    """

    cpu: str
    cores: int
    accelerators: tuple[str, ...]
    task: str
    model: str
    batch_size: int
    threads: int
    processes_per_device: int
    optimizer: str
    precision: str = "float32"

    @classmethod
    def here(cls, config: RunConfig, machine: Machine | None = None) -> "ProfileKey":
        """Return the key of a run with these settings on this machine."""
        machine = machine or this_machine()
        return cls(
            cpu=_cpu_name(),
            cores=len(machine.cores),
            accelerators=_accelerator_names(machine),
            task=config.task,
            model=config.model,
            batch_size=config.batch_size,
            threads=config.threads,
            processes_per_device=config.processes_per_device,
            optimizer=config.optimizer,
        )

    def difference(self, other: "ProfileKey") -> str:
        """Return the first field that differs, in words; empty if none does."""
        mine, others = asdict(self), asdict(other)
        for field, value in mine.items():
            if others[field] != value:
                name = field.replace("_", "-")
                return f"it was measured with {name} = {value!r}, and here it is {others[field]!r}"
        return ""


@dataclass(frozen=True)
class SpeedProfile:
    """What `calibrate` measured.

    Parameters
    ----------
    key : ProfileKey
        What it holds for.
    workers : tuple of WorkerSpeed
        In the order of the worker specification.
    overhead_seconds : Spread
        Of one round: what it takes beside the longest worker's computing.
    """

    key: ProfileKey
    workers: tuple[WorkerSpeed, ...]
    overhead_seconds: Spread

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> "SpeedProfile":
        """Read a profile.

        Raises
        ------
        UsageError
            If there is none, or it cannot be read as one.
        """
        try:
            return cls._from(json.loads(path.read_text()))
        except OSError as error:
            raise UsageError(
                f"profile = {str(path)!r} cannot be read: {error.strerror}; blsgd calibrate "
                "writes one"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(
                f"profile = {str(path)!r} is not a speed profile; blsgd calibrate writes one"
            ) from None

    @classmethod
    def _from(cls, read: Any) -> "SpeedProfile":
        if read["format"] != _FORMAT:
            raise ValueError("another format")
        key = {**read["key"], "accelerators": tuple(read["key"]["accelerators"])}
        workers = tuple(
            WorkerSpeed(
                str(w["device"]), float(w["slowdown"]), _spread(w["alone"]), _spread(w["loaded"])
            )
            for w in read["workers"]
        )
        return cls(
            ProfileKey(**key), workers, _spread(read["overhead_seconds"], at_least_zero=True)
        )

    def mismatch(self, key: ProfileKey, workers: Sequence[WorkerSpec]) -> str:
        """Return why this profile does not hold here, in words; empty if it does."""
        if reason := self.key.difference(key):
            return reason
        measured = [(w.device, w.slowdown) for w in self.workers]
        named = [(w.device_with_cores, w.slowdown) for w in workers]
        if measured != named:
            return f"it holds the speeds of {_names(measured)}, and the workers are {_names(named)}"
        return ""

    def given_to(self, workers: Sequence[WorkerSpec], clock: Clock) -> list[WorkerSpec]:
        """Return the workers with these speeds: on the wall clock those under load.

        One whose speed was given keeps it: it may stand for hardware that is not here.
        """
        return [
            worker
            if worker.seconds_per_step is not None
            else replace(
                worker,
                seconds_per_step=(speed.alone if clock == "device" else speed.loaded).median,
                seconds_per_step_alone=speed.alone.median,
            )
            for worker, speed in zip(workers, self.workers, strict=True)
        ]


def with_profile(
    workers: Sequence[WorkerSpec], config: RunConfig
) -> tuple[list[WorkerSpec], SpeedProfile | None]:
    """Return the workers with the speeds of the settings' profile, and the profile if there is one.

    Raises
    ------
    UsageError
        If it cannot be read, or holds for something else.
    """
    if not config.profile:
        return list(workers), None
    profile = SpeedProfile.read(Path(config.profile))
    if reason := profile.mismatch(ProfileKey.here(config), workers):
        raise UsageError(
            f"profile = {config.profile!r} does not hold here: {reason}; measure with "
            "blsgd calibrate, or leave profile empty"
        )
    return profile.given_to(workers, config.clock), profile


def _names(workers: Sequence[tuple[str, float]]) -> str:
    return ", ".join(d if s == 1 else f"{d} slowdown={s:g}" for d, s in workers) or "nobody"


def _spread(read: Any, at_least_zero: bool = False) -> Spread:
    values = Spread(
        float(read["median"]), float(read["low"]), float(read["high"]), int(read["count"])
    )
    finite = all(math.isfinite(v) for v in (values.median, values.low, values.high))
    if not finite or values.median < 0 or (values.median == 0 and not at_least_zero):
        raise ValueError("no such time")
    return values


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _accelerator_names(machine: Machine) -> tuple[str, ...]:
    names = []
    for device in machine.accelerators:
        kind, _, number = device.partition(":")
        if kind == "cuda":
            import torch

            names.append(torch.cuda.get_device_name(int(number)))
        else:
            names.append(device)
    return tuple(names)
