"""Read what a run left: its settings, its summary and its epochs, as typed figures."""

import csv
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError

Setting = bool | int | float | str


@dataclass(frozen=True)
class FinishedEpoch:
    """One line of ``epochs.csv``; what was not measured is None."""

    epoch: int
    training_seconds: float
    device_seconds: float | None
    accuracy: float | None
    loss: float | None


@dataclass(frozen=True)
class FinishedWorker:
    """One worker of a run.

    Attributes
    ----------
    local_steps : int
        In a round; 0 if it trained on nothing, such as one that only adds up models.
    """

    device: str
    tier: str
    local_steps: int


@dataclass(frozen=True)
class FinishedRun:
    """A run that is over, as its results folder tells it; what was not measured is None.

    Attributes
    ----------
    accuracy : float, optional
        Of the final model, in [0, 1].
    device_seconds : float, optional
        Computed, as if each worker had its own device.
    failures : int
        How many answers of workers did not count.
    versions : mapping of str to str
        By package.
    settings : mapping
        As in ``config.toml``, with keys in kebab-case.
    """

    algorithm: str
    seed: int
    task: str
    accuracy: float | None
    loss: float | None
    training_seconds: float
    device_seconds: float | None
    clock: str
    samples: int
    samples_given_up: int
    rounds: int
    fast_waiting_share: float | None
    slow_waiting_share: float | None
    failures: int
    workers: tuple[FinishedWorker, ...]
    versions: Mapping[str, str]
    settings: Mapping[str, Setting]
    epochs: tuple[FinishedEpoch, ...]

    @property
    def best_accuracy(self) -> float | None:
        """The highest of any epoch; None if none was evaluated."""
        return max((row.accuracy for row in self.epochs if row.accuracy is not None), default=None)


def is_finished(folder: Path) -> bool:
    """Return whether the folder holds a run that went to its end."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and summary.get("interrupted") is False


def read_run(folder: Path) -> FinishedRun:
    """Read a results folder.

    Raises
    ------
    UsageError
        If it holds no run, one that was stopped early, or figures that cannot be read.
    """
    if not (folder / "summary.json").is_file():
        raise UsageError(f"{folder} is no finished run: it has no summary.json")
    file = "summary.json"
    try:
        summary = json.loads((folder / file).read_text())
        interrupted = bool(summary["interrupted"])
        if not interrupted:
            file = "config.toml"
            settings = tomllib.loads((folder / file).read_text())
            file = "epochs.csv"
            epochs = _epochs(folder / file)
            file = "summary.json"
            return _run(summary, settings, epochs)
    except OSError as error:
        raise UsageError(f"{folder / file} cannot be read: {error.strerror}") from None
    except KeyError as error:
        raise UsageError(f"{folder / file} has no {error}: it is none of a run's files") from None
    except (ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{folder / file} cannot be read: {reason}") from None
    raise UsageError(f"{folder} is no finished run: it was stopped early; remove it and run again")


def _run(
    summary: Mapping[str, Any], settings: Mapping[str, Setting], epochs: tuple[FinishedEpoch, ...]
) -> FinishedRun:
    return FinishedRun(
        algorithm=summary["algorithm"],
        seed=int(summary["seed"]),
        task=summary["task"],
        accuracy=_number(summary["accuracy"]),
        loss=_number(summary["loss"]),
        training_seconds=float(summary["training_seconds"]),
        device_seconds=_number(summary["device_seconds"]),
        clock=summary["clock"],
        samples=int(summary["samples"]),
        samples_given_up=int(summary["samples_given_up"]),
        rounds=int(summary["rounds"]),
        fast_waiting_share=_number(summary["fast_waiting_share"]),
        slow_waiting_share=_number(summary["slow_waiting_share"]),
        failures=len(summary["failures"]),
        workers=tuple(
            FinishedWorker(
                worker["device"],
                worker["tier"],
                int(worker["local_steps"]) if worker["samples"] else 0,
            )
            for worker in summary["workers"]
        ),
        versions=dict(summary["versions"]),
        settings=settings,
        epochs=epochs,
    )


def _epochs(file: Path) -> tuple[FinishedEpoch, ...]:
    with file.open(newline="") as lines:
        return tuple(
            FinishedEpoch(
                epoch=int(row["epoch"]),
                training_seconds=float(row["training_seconds"]),
                device_seconds=_number(row["device_seconds"]),
                accuracy=_number(row["accuracy"]),
                loss=_number(row["loss"]),
            )
            for row in csv.DictReader(lines)
        )


def _number(value: Any) -> float | None:
    return None if value is None or value == "" else float(value)
