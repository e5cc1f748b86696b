"""Read what a finished run left: its settings, its summary and its epochs, as typed figures."""

import csv
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config import RETIRED
from ..errors import UsageError


@dataclass(frozen=True)
class FinishedEpoch:
    """One line of ``epochs.csv``; what was not measured is None."""

    epoch: int
    training_seconds: float
    device_seconds: float | None
    accuracy: float | None


@dataclass(frozen=True)
class FinishedRun:
    """The figures of a results folder; what was not measured is None.

    Attributes
    ----------
    accuracy : float, optional
        Of the final model, in [0, 1].
    device_seconds : float, optional
        Computed, as if each worker had its own device.
    failures, workers : sequence of mappings
        As in ``summary.json``: replies that did not count, and workers that train.
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
    failures: Sequence[Mapping[str, Any]]
    workers: Sequence[Mapping[str, Any]]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    epochs: tuple[FinishedEpoch, ...]

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy of any epoch; None if none was evaluated."""
        return max((row.accuracy for row in self.epochs if row.accuracy is not None), default=None)


_FROM_SUMMARY = [f.name for f in fields(FinishedRun) if f.name not in ("settings", "epochs")]


def read_run(folder: Path) -> FinishedRun | None:
    """Read a results folder; None if it holds no run that went to its end.

    Raises
    ------
    UsageError
        If a run did go to its end, and left figures that cannot be read.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(summary, dict) or summary.get("interrupted") is not False:
        return None
    try:
        settings = tomllib.loads((folder / "config.toml").read_text())
        with (folder / "epochs.csv").open(newline="") as lines:
            epochs = tuple(_epoch(row) for row in csv.DictReader(lines))
        return FinishedRun(
            **{name: summary[name] for name in _FROM_SUMMARY},
            settings={key: value for key, value in settings.items() if key not in RETIRED},
            epochs=epochs,
        )
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from None
    except (KeyError, ValueError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise UsageError(f"the run in {folder} cannot be read: {reason}") from None


def _epoch(row: Mapping[str, str]) -> FinishedEpoch:
    return FinishedEpoch(
        epoch=int(row["epoch"]),
        training_seconds=float(row["training_seconds"]),
        device_seconds=_number(row["device_seconds"]),
        accuracy=_number(row["accuracy"]),
    )


def _number(text: str) -> float | None:
    return float(text) if text else None
