"""The folder that a run leaves: settings, rounds, epochs, summary and model; and whole files."""

import contextlib
import csv
import dataclasses
import itertools
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from flwr.app import ArrayRecord
from safetensors.numpy import save_file

from ..algorithm.epoch_plan import SamplingStats
from ..errors import UsageError
from ..strategy.round_metrics import RoundRecord

RUNS = "runs"
LATEST = "latest"

_OWN_NAMES = {
    *("config.toml", "rounds.jsonl", "epochs.csv", "summary.json", "model.safetensors"),
    *("learning_curve.png", "timeline.png", "sampling.png", "trace"),
}


@dataclasses.dataclass(frozen=True)
class EpochRow:
    """One line of ``epochs.csv``; an empty field was not measured."""

    epoch: int
    wall_seconds: float
    training_seconds: float
    device_seconds: float | None
    accuracy: float | None
    loss: float | None
    learning_rate: float
    train_loss: float
    rounds: int
    samples: int
    mean_loss_age_rounds: float
    sampling: SamplingStats


class RunFolder:
    """Writes a run's results to a folder of its own as they come; `new` makes one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def new(cls, out: str, name: str) -> "RunFolder":
        """Make the folder: `out` itself, or the next free ``runs/<name>-<n>``.

        UsageError if `out` exists, or the folder cannot be made.
        """
        cls.refuse_unusable(out)
        path = Path(out)
        try:
            if out:
                path.mkdir(parents=True)
            else:
                path = _next_free(Path(RUNS), name)
        except OSError as error:
            raise UsageError(f"out = {out or RUNS!r} cannot be made: {error.strerror}") from None
        return cls(path.resolve())

    @staticmethod
    def refuse_unusable(out: str) -> None:
        """Raise UsageError if `new` could not make this folder; writes nothing."""
        if out and os.path.lexists(out):
            raise UsageError(
                f"out = {out!r} exists; name a folder that does not, or leave out empty"
            )
        if reason := why_not_writable(Path(out or RUNS)):
            raise UsageError(f"out = {out or RUNS!r} cannot be made: {reason}")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.toml``: all settings, resolved."""
        (self.path / "config.toml").write_text(tomli_w.dumps(dict(config)))

    def add_round(self, record: RoundRecord) -> None:
        """Append a line to ``rounds.jsonl``."""
        with (self.path / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(_plain(dataclasses.asdict(record))) + "\n")

    def add_epoch(self, row: EpochRow) -> None:
        """Append a line to ``epochs.csv``; the columns of `sampling` have its own names."""
        columns = dataclasses.asdict(row)
        columns |= columns.pop("sampling")
        with (self.path / "epochs.csv").open("a", newline="") as file:
            writer = csv.DictWriter(file, list(columns))
            if not file.tell():
                writer.writeheader()
            writer.writerow(_plain(columns))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, whole or not at all."""
        with written_whole(self.path / "summary.json") as part:
            part.write_text(json.dumps(_plain(dict(summary)), indent=2) + "\n")

    def add_assets(self, assets: Mapping[str, Path]) -> None:
        """Copy what a saved model needs, each file whole or not at all.

        UsageError if a name is one of a run's own files, or a file cannot be copied.
        """
        for name, source in assets.items():
            if name in _OWN_NAMES:
                raise UsageError(f"task: assets names {name!r}, which a run writes itself")
            try:
                with written_whole(self.path / name) as part:
                    shutil.copyfile(source, part)
            except OSError as error:
                raise UsageError(
                    f"task: assets: {source} cannot be copied to {self.path} ({error.strerror})"
                ) from None

    def write_model(self, arrays: ArrayRecord) -> None:
        """Write ``model.safetensors``, the state dict, whole or not at all."""
        tensors = {name: np.asarray(a.numpy(), order="C") for name, a in arrays.items()}
        with written_whole(self.path / "model.safetensors") as part:
            save_file(tensors, part)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path beside this one to write to, and rename it when all is written.

    So a file is whole or not there, whatever ends the writing, and two may write at once.
    """
    part = path.with_name(f".{path.stem}-{uuid.uuid4().hex}{path.suffix}")
    try:
        yield part
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def why_not_writable(folder: Path) -> str:
    """Return why nothing can be written below a folder that may not exist yet; empty if it can."""
    wanted = folder.absolute()
    there = next(path for path in (wanted, *wanted.parents) if path.exists())
    if not there.is_dir():
        return f"{there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} may not be written to"
    return ""


def _next_free(runs: Path, name: str) -> Path:
    """Make the next free folder, and point ``latest`` to it."""
    runs.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = runs / f"{name}-{number}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()  # atomic: of two runs that start at once each gets its own
            break
    with (
        contextlib.suppress(OSError),  # somebody's own folder of that name stays
        written_whole(runs / LATEST) as link,
    ):
        link.symlink_to(path.name)
    return path


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: nan and infinity become null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
