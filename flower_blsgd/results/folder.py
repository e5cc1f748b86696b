"""The results folder of a run: settings, rounds, epochs, summary and model."""

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from flwr.app import ArrayRecord
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ..algorithm.sampling_stats import SamplingStats
from ..config import RunConfig
from ..errors import UsageError
from ..fields import from_json, to_json
from ..files import (
    append,
    locked,
    temporary_path,
    unless_unsupported,
    write_text,
    written_whole,
)
from ..flower.array_records import AnyArray, tensors_of
from ..strategy.round_metrics import RoundRecord
from .metric import ACCURACY
from .tables import brief, csv_of

RUNS = "runs"
LATEST = "latest"
MODEL, BEST_MODEL = "model.safetensors", "best_model.safetensors"
CHECKPOINTS = "checkpoint"
MODEL_CARD = "README.md"

_OWN_NAMES = {
    *("config.toml", "run.log", "rounds.jsonl", "epochs.csv", "summary.json", MODEL, BEST_MODEL),
    *(
        MODEL_CARD,
        "learning_curve.png",
        "timeline.png",
        "sampling.png",
        "trace",
        "tensorboard",
        CHECKPOINTS,
    ),
}


@dataclasses.dataclass(frozen=True)
class EpochRow:
    """One line of ``epochs.csv``; an empty field was not measured.

    An accuracy is in `accuracy`, any other metric in `metric`. `rounds` counts the rounds before
    the evaluated model. For async evaluation, `result_rounds` and `result_seconds` are the rounds
    and the wall clock when the result arrived.
    """

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
    metric: float | None = None
    result_rounds: int | None = None
    result_seconds: float | None = None

    @property
    def value(self) -> float | None:
        """Value of the accuracy or of another metric; None without an evaluation."""
        return self.metric if self.accuracy is None else self.accuracy

    @property
    def late(self) -> tuple[int, float] | None:
        """Rounds and seconds from the epoch to its result; None without async evaluation."""
        if self.result_rounds is None or self.result_seconds is None:
            return None
        return self.result_rounds - self.rounds, self.result_seconds - self.wall_seconds


def shown_late(late: tuple[float, float]) -> str:
    """Return ``"3 rounds and 0.52 s"``."""
    return f"{brief(late[0])} round{'' if late[0] == 1 else 's'} and {brief(late[1], 2)} s"


def scalars(record: Any) -> dict[str, float]:
    """Return the finite numbers in a dataclass and in its nested dataclasses, by field name."""
    found: dict[str, float] = {}
    for field in dataclasses.fields(record):
        name, value = field.name, getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            found |= scalars(value)
        elif type(value) in (int, float) and math.isfinite(value):
            found[name] = value
    return found


class RunFolder:
    """Writer of the results of a run to its folder, as they arrive; `new` makes the folder.

    The description of `metric` is in the last columns of ``epochs.csv``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metric = ACCURACY

    @classmethod
    def new(cls, out: str, name: str) -> "RunFolder":
        """Make the folder: `out` itself, or the next free ``runs/<name>-<n>``.

        UsageError if `out` exists, or the folder cannot be made.
        """
        cls.refuse_unusable(out)
        path = Path(out)
        with refused(f"out = {out or RUNS!r} cannot be made"):
            if out:
                path.mkdir(parents=True)
            else:
                path = _next_free(Path(RUNS), name)
        return cls(path.resolve())

    @staticmethod
    def refuse_unusable(out: str) -> None:
        """Raise UsageError if `new` cannot make this folder; write nothing."""
        if out and os.path.lexists(out):
            raise UsageError(
                f"out = {out!r} exists; name a folder that does not, or leave out empty"
            )
        wanted = Path(out or RUNS).absolute()
        there = next(path for path in (wanted, *wanted.parents) if os.path.exists(path))
        why = f"out = {out or RUNS!r} cannot be made: {there}"
        if not there.is_dir():
            raise UsageError(f"{why} is not a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UsageError(f"{why} may not be written to")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.toml``: all resolved settings, with an empty ``resume``.

        UsageError if the folder cannot be written to.
        """
        with refused(f"{self.path} cannot be written to"):
            write_text(self.path / "config.toml", tomli_w.dumps({**config, "resume": ""}))

    def add_round(self, record: RoundRecord) -> None:
        """Append a line to ``rounds.jsonl``."""
        append(self.path / "rounds.jsonl", _line(record))

    def add_epoch(self, row: EpochRow) -> None:
        """Append a line to ``epochs.csv``; the fields of `sampling` are columns."""
        path = self.path / "epochs.csv"
        append(path, self._csv([row], header=not path.exists() or not path.stat().st_size))

    def write_epochs(self, rows: Sequence[EpochRow]) -> None:
        """Replace ``epochs.csv``, whole or not at all."""
        write_text(self.path / "epochs.csv", self._csv(rows, header=True))

    def _csv(self, rows: Sequence[EpochRow], header: bool) -> str:
        columns = [dataclasses.asdict(row) for row in rows]
        return csv_of(
            [to_json(row | row.pop("sampling") | self.metric.description) for row in columns],
            header,
        )

    def rounds_until(self, last_round: int) -> list[RoundRecord]:
        """Return the rounds up to one, without incomplete lines, which a kill may leave."""
        records: list[RoundRecord] = []
        with contextlib.suppress(OSError):
            for line in (self.path / "rounds.jsonl").read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    record: RoundRecord = from_json(RoundRecord, json.loads(line))
                    if (records[-1].round if records else 0) < record.round <= last_round:
                        records.append(record)
        return records

    def cut_back(self, records: Sequence[RoundRecord], rows: Sequence[EpochRow]) -> None:
        """Keep only these rounds and epochs, and no summary; UsageError if that is impossible."""
        with refused(f"{self.path} cannot be written to"):
            write_text(self.path / "rounds.jsonl", "".join(map(_line, records)))
            self.write_epochs(rows)
            for name in ("summary.json", MODEL_CARD):
                (self.path / name).unlink(missing_ok=True)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, whole or not at all."""
        text = json.dumps(to_json(dict(summary)), indent=2)
        write_text(self.path / "summary.json", text + "\n")

    def write_model_card(self, text: str) -> None:
        """Write the card of the model, whole or not at all."""
        write_text(self.path / MODEL_CARD, text)

    def add_assets(self, assets: Mapping[str, Path]) -> None:
        """Copy the files that a saved model needs, each whole or not at all.

        UsageError if a run writes a file of that name itself, or a file cannot be copied.
        """
        for name, source in assets.items():
            if name in _OWN_NAMES:
                raise UsageError(f"task: assets names {name!r}, which a run writes itself")
            with (
                refused(f"task: assets: {source} cannot be copied to {self.path}"),
                written_whole(self.path / name) as part,
            ):
                shutil.copyfile(source, part)

    def write_model(self, arrays: ArrayRecord) -> None:
        """Write ``model.safetensors``, the state dict, whole or not at all; or raise OSError."""
        tensors = tensors_of(arrays)
        with temporary_path(self.path) as part:
            try:
                save_tensors(part, tensors)
            except SafetensorError as error:  # which contains the error of the system as text only
                raise OSError(errno.EIO, str(error)) from None
            part.replace(self.path / MODEL)


def save_tensors(
    path: Path, tensors: Mapping[str, AnyArray], about: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the default mode of new files; the library uses 600."""
    path.touch()
    mode = path.stat().st_mode
    save_file({name: np.asarray(t, order="C") for name, t in tensors.items()}, path, about)
    with unless_unsupported():
        path.chmod(mode)


def read_config(folder: Path) -> RunConfig:
    """Return the settings of a run; UsageError if they are missing or cannot be read."""
    file = folder / "config.toml"
    if not file.is_file():
        raise UsageError(f"{folder} is not a run: it has no config.toml; name a folder under runs/")
    return read_settings(file)


def read_settings(file: Path) -> RunConfig:
    """Return the settings in a TOML file; UsageError if it cannot be read."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        return RunConfig.from_run_config(values, saved=True)
    except (OSError, ValueError, RecursionError) as error:  # no text, no TOML, an invalid setting
        raise UsageError(f"{file} cannot be read: {error}") from None


@contextlib.contextmanager
def alone_in(folder: Path, refusal: str) -> Iterator[None]:
    """Lock an existing folder; UsageError with this text if another process has locked it.

    The kernel releases the lock when the process ends.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / ".lock", wait=False))
        except BlockingIOError:
            raise UsageError(refusal) from None
        except OSError:  # the disk is full
            pass
        yield


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """Raise UsageError with this text and the system's reason instead of an OSError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}") from None


def _next_free(runs: Path, name: str) -> Path:
    """Make the next free folder, and point ``latest`` to it."""
    runs.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = runs / f"{name}-{number}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()  # atomic: two runs that start together get two folders
            break
    with (
        contextlib.suppress(OSError),  # a folder of that name stays
        written_whole(runs / LATEST) as link,
    ):
        link.symlink_to(path.name)
    return path


def _line(record: RoundRecord) -> str:
    try:
        return json.dumps(record, default=vars, allow_nan=False) + "\n"
    except ValueError:  # nan, as the loss of a worker that failed
        return json.dumps(to_json(record)) + "\n"
