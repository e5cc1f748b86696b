"""Measured speeds on disk: for which machine, workers and model they hold."""

import contextlib
import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..algorithm.local_steps import Clock
from ..config import RunConfig
from ..errors import UsageError
from ..runtime.devices import WorkerSpec
from ..runtime.machine import Machine, accelerator_names, cpu_name, this_machine

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
    replicas : str
        As in the settings.
    channels_last, compile, cuda_graph : bool
        As in the settings.
    micro_batch_size, max_tokens : int
        As in the settings.
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
    replicas: str = "threads"
    channels_last: bool = False
    compile: bool = False
    cuda_graph: bool = True
    micro_batch_size: int = 0
    max_tokens: int = 128

    @classmethod
    def here(cls, config: RunConfig, machine: Machine | None = None) -> "ProfileKey":
        """Return the key of a run with these settings on this machine."""
        machine = machine or this_machine()
        return cls(
            cpu=cpu_name(),
            cores=len(machine.cores),
            accelerators=accelerator_names(machine),
            **{f.name: getattr(config, f.name) for f in fields(cls) if hasattr(config, f.name)},
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
        """Write it, whole or not at all.

        Raises
        ------
        UsageError
            If it cannot be written there.
        """
        part = path.with_name(f".{path.stem}-{uuid.uuid4().hex}.part")  # two may write at once
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n")
            part.replace(path)
        except OSError as error:
            raise UsageError(
                f"profile = {str(path)!r} cannot be written: {error.strerror}"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

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
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise UsageError(
                f"profile = {str(path)!r} is not a speed profile; blsgd calibrate writes one"
            ) from None

    @classmethod
    def _from(cls, read: Any) -> "SpeedProfile":
        if read["format"] != _FORMAT:
            raise ValueError("another format")
        key = {**read["key"], "accelerators": tuple(read["key"]["accelerators"])}
        if not all(isinstance(value, str | int) for value in _flat(key.values())):
            raise ValueError("no such key")
        workers = tuple(
            WorkerSpeed(
                *(_text(w["device"]), _number(w["slowdown"])),
                *(_spread(w["alone"]), _spread(w["loaded"])),
            )
            for w in read["workers"]
        )
        overhead = _spread(read["overhead_seconds"], at_least_zero=True)
        return cls(ProfileKey(**key), workers, overhead)

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


def refuse_unwritable(path: Path) -> None:
    """Raise UsageError if a profile cannot be written there; writes nothing."""
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise UsageError(f"profile = {str(path)!r} cannot be written: it is a folder")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"profile = {str(path)!r} cannot be written: {there} takes no files")


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


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def _spread(read: Any, at_least_zero: bool = False) -> Spread:
    median, low, high = (_number(read[key]) for key in ("median", "low", "high"))
    if not 0 <= low <= median <= high or (median == 0 and not at_least_zero):
        raise ValueError("no such time")
    if _number(read["count"]) < 1:
        raise ValueError("not measured")
    return Spread(median, low, high, int(read["count"]))


def _number(read: Any) -> float:
    if isinstance(read, bool) or not isinstance(read, int | float) or not abs(read) < math.inf:
        raise ValueError("not a finite number")
    return float(read)


def _text(read: Any) -> str:
    if not isinstance(read, str) or not read.isprintable():
        raise ValueError("not a text")
    return read
