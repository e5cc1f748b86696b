"""A run as its results folder describes it so far, for ``blsgd watch``.

Only ``config.toml``, ``rounds.jsonl``, ``epochs.csv`` and ``summary.json`` are read. The run writes
a line as soon as a round or an epoch ends, so this is as recent as the last call of `update`.
"""

import csv
import json
import math
import os
import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..devices.worker_spec import parse_workers
from ..errors import UsageError
from ..fields import from_json
from ..strategy.budget import Budget
from ..strategy.round_metrics import RoundRecord, WorkerRound
from .folder import read_config
from .metric import ACCURACY, Metric, value_in

RECENT_SECONDS = 10.0
"""Shares and speeds are those of the last rounds, which together took this time."""

_CHUNK_BYTES = 1 << 24
_MOST_LOSSES = 1000


class AppendedLines:
    """Reads the complete lines of a growing file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def began_again(self) -> bool:
        """Return whether the file was removed, replaced or cut since the last call.

        Then it is read from its beginning. `read` does not notice this itself.
        """
        file = self._file
        if file is None:
            with suppress(OSError):
                self._file = self._path.open("rb")
            return False
        with suppress(OSError):
            found, ours = self._path.stat(), os.fstat(file.fileno())
            if os.path.samestat(found, ours) and found.st_size >= file.tell():
                return False
        self.close()
        self.began_again()
        return True

    def read(self) -> Iterator[str]:
        """Yield the new complete lines; the next call continues after a line that is not."""
        while self._file is not None and (data := self._file.read(_CHUNK_BYTES)):
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""


@dataclass(frozen=True)
class LiveWorker:
    """What a worker did in the last rounds.

    `label` is such as ``fast-0 (cpu:0)``. `role` is "train", "sum" (it sums models of others) or
    "evaluate" (async). `local_steps` are those of its last order. `samples_per_second` counts the
    samples trained on, over the time of the rounds. `computing` and `waiting` are shares of the
    time of its rounds; the rest is transfer and averaging.
    """

    label: str
    role: str = "train"
    local_steps: int = 0
    samples_per_second: float = 0.0
    computing: float = 0.0
    waiting: float = 0.0


@dataclass(frozen=True)
class Curve:
    """Finite values of a figure over epochs or rounds.

    `over` is "epoch" or "round": what `positions` count, where each value was measured.
    """

    metric: Metric
    over: str
    positions: Sequence[int]
    values: Sequence[float]


class LiveRun:
    """A run in its results folder; `update` reads what is new.

    UsageError if the folder is not that of a run. `last` is the last round, None before the first
    one. `rounds` are the last rounds, of about `RECENT_SECONDS`; together they took
    `recent_seconds`. `epochs` has the numbers in the lines of ``epochs.csv``. `metric` is that of
    the task. `failures` counts the failures of each worker by label, then by kind. `last_failure`
    is the round and the reason of the last one. `summary` is the content of ``summary.json``, None
    while the run goes on.
    """

    def __init__(self, folder: Path) -> None:
        if (folder / "comparison.toml").is_file():
            runs = sorted(path.parent for path in folder.glob("*/config.toml"))
            such = f", such as {runs[-1]}" if runs else ""
            raise UsageError(f"{folder} is a comparison; name the folder of one of its runs{such}")
        self.config = read_config(folder)
        self.folder = folder.resolve()  # runs/latest is a link
        self.summary: dict[str, Any] | None = None
        self.epochs: list[dict[str, float]] = []
        self.metric = ACCURACY
        self._file = AppendedLines(self.folder / "rounds.jsonl")
        self.close = self._file.close
        self._forget_rounds()

    def _forget_rounds(self) -> None:
        self.last: RoundRecord | None = None
        self.rounds: deque[RoundRecord] = deque()
        self.recent_seconds = 0.0
        self.failures: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.last_failure = ""
        self._training_seconds = 0.0
        self._samples = 0
        self._losses = array("d")

    def update(self) -> None:
        """Read what the run has written since the last call; UsageError if its folder is gone."""
        # First: a run that is over writes no more rounds.
        self.summary = None
        with suppress(OSError, ValueError):
            self.summary = json.loads((self.folder / "summary.json").read_bytes())
        # As by --resume, which may change settings; UsageError if the folder is gone.
        if self._file.began_again() or not self.folder.is_dir():
            self.config = read_config(self.folder)
            self._forget_rounds()
        for line in self._file.read():
            with suppress(ValueError, RecursionError):
                self._add(from_json(RoundRecord, json.loads(line)))
        self.epochs.clear()
        with suppress(OSError):
            text = (self.folder / "epochs.csv").read_text(errors="replace")
            for row in csv.DictReader(text.splitlines()):
                metric = Metric.of(row, self.config.validation_share)
                cells = {name: row[name] for name in row if name not in metric.description}
                with suppress(ValueError, TypeError):  # the line is incomplete
                    self.epochs.append({n: float(cell) for n, cell in cells.items() if cell != ""})
                    self.metric = metric

    def _add(self, record: RoundRecord) -> None:
        if self.last is not None and record.round <= self.last.round:
            return
        self.last = record
        self.rounds.append(record)
        self._training_seconds += record.planning_seconds + record.round_seconds
        self._samples += sum(row.num_examples for row in record.workers)
        self._losses.append(record.train_loss)
        for row in record.workers:
            if row.failure:
                self.failures[row.label][row.failure_kind] += 1
                self.last_failure = f"round {record.round}: {row.failure}"
        self.recent_seconds += _seconds(record)
        while self.recent_seconds - (first := _seconds(self.rounds[0])) >= RECENT_SECONDS:
            self.recent_seconds -= first
            self.rounds.popleft()

    @property
    def share_done(self) -> float:
        """Used share of the run's budget."""
        if self.last is None:
            return 0.0
        config, last = self.config, self.last
        seconds = self._training_seconds
        if config.clock == "device":
            seconds *= self._ratio("device_seconds")
        used = Budget(last.epochs_done, seconds, last.round, self._samples)
        return min(1.0, Budget.of_run(config).share(used))

    @property
    def seconds_left(self) -> float | None:
        """Time until the budget is used up, at the mean speed so far; None before a round."""
        share = self.share_done
        if not share:
            return None
        return self._training_seconds * self._ratio("wall_seconds") * (1 - share) / share

    def _ratio(self, column: str) -> float:
        """Return the time in a column of the last epoch over its time of training; else 1."""
        row = self.epochs[-1] if self.epochs else {}
        training = row.get("training_seconds", 0.0)
        return row.get(column, training) / training if training else 1.0

    @property
    def idle_seconds(self) -> float:
        """Time since the run last wrote its settings, a round or an epoch."""
        with suppress(OSError, ValueError):  # the folder is gone
            names = ("config.toml", "rounds.jsonl", "epochs.csv")
            files = [path for name in names if (path := self.folder / name).exists()]
            return max(0.0, time.time() - max(path.stat().st_mtime for path in files))
        return 0.0

    @property
    def workers(self) -> list[LiveWorker]:
        """The workers of the last rounds in their order, then those that only evaluate."""
        by_worker: defaultdict[int, list[tuple[float, WorkerRound]]] = defaultdict(list)
        for record in self.rounds:
            for row in record.workers:
                by_worker[row.worker].append((record.round_seconds, row))
        workers = []
        for _, its in sorted(by_worker.items()):
            seconds, rows = sum(taken for taken, _ in its) or 1.0, [row for _, row in its]
            worker = LiveWorker(
                rows[-1].label,
                "train" if rows[-1].trained else "sum",
                rows[-1].local_steps,
                sum(row.num_examples for row in rows) / (self.recent_seconds or 1.0),
                sum(row.compute_seconds or row.summing_seconds for row in rows) / seconds,
                sum(row.waiting_seconds for row in rows) / seconds,
            )
            workers.append(worker)
        return workers + [LiveWorker(label, "evaluate") for label in self._evaluating()]

    def _evaluating(self) -> list[str]:
        """Return the labels of the workers that evaluate while others train."""
        found: list[str] = []
        if "role=evaluate" in self.config.workers:  # "auto" would look for accelerators
            with suppress(UsageError):
                workers = parse_workers(self.config.workers, anywhere=True)
                found = [
                    f"{its.name} ({its.device_with_cores})" if its.name else its.device_with_cores
                    for its in workers
                    if its.role == "evaluate"
                ]
        return found or ["evaluating worker"] * (self.last_late is not None)

    @property
    def last_late(self) -> tuple[int, float] | None:
        """Epoch of the last async evaluation, and its delay in seconds; None without one."""
        for row in reversed(self.epochs):
            if "result_seconds" in row:
                return int(row["epoch"]), row["result_seconds"] - row["wall_seconds"]
        return None

    @property
    def curve(self) -> Curve | None:
        """The metric over epochs, or until two of them are evaluated the loss over rounds."""
        known = [
            (int(row["epoch"]), value)
            for row in self.epochs
            if (value := value_in(row)) is not None
        ]
        if len(known) >= 2:
            return Curve(self.metric, "epoch", *zip(*known, strict=True))
        each = -(-len(self._losses) // _MOST_LOSSES)
        parts = ((i, self._losses[i : i + each]) for i in range(0, len(self._losses), each or 1))
        losses = [(i + len(part), sum(part) / len(part)) for i, part in parts]
        losses = [(i, loss) for i, loss in losses if math.isfinite(loss)]
        loss = Metric("train loss", "min")
        return Curve(loss, "round", *zip(*losses, strict=True)) if losses else None


def _seconds(record: RoundRecord) -> float:
    return record.planning_seconds + record.round_seconds
