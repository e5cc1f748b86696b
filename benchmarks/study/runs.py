"""One run of the study: what it is, how it is done, and the row that it leaves."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.taken_under import conditions
from flower_blsgd.devices.pinning import ALLOCATOR

from .arms import ARMS, FAST_CORE, SHAPES, SLOW_CORE
from .tasks import Places, settings_of

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
MOST_TRIES = 3
STEP_SECONDS = (0.00023, 0.00122)
"""Seconds per step of the fast device where time is counted: a constant, and per sample.

Measured by the first study, as all of its rows are on these machines.
"""

_START_SECONDS, _EVALUATION_SECONDS = 90.0, 600.0
"""Starting and calibration never take longer, nor evaluation, so a run that does hangs."""

_ENVIRONMENT = {**os.environ, **ALLOCATOR}
"""The allocator's settings that workers of this project have make every loop a quarter faster."""


@dataclass(frozen=True)
class Run:
    """A run of an arm.

    Parameters
    ----------
    stage, arm : str
        Stage of PLAN2.md, and key of `ARMS`.
    rate, seconds : float
        Learning rate, and budget of training.
    decay : {"steps", "linear"} (default: "linear")
        How the rate falls: times 0.1 at 60 % and at 80 % of the budget, or in a line to zero.
    shape : str (default: "gap-2")
        Key of `SHAPES`; empty for the fast device alone.
    seed : int (default: 0)
        Seed of everything that is drawn.
    task : {"cifar10", "validation"} (default: "validation")
        As of `tasks.settings_of`.
    clock : {"counted", "wall"} (default: "counted")
        Whether time is counted from given seconds per step, on one core, or measured on two.
    block : int (default: 0)
        Repetition of a timing.
    neighbor : bool (default: False)
        Whether the other core computes in the meantime.
    """

    stage: str
    arm: str
    rate: float
    seconds: float
    decay: str = "linear"
    shape: str = "gap-2"
    seed: int = 0
    task: str = "validation"
    clock: str = "counted"
    block: int = 0
    neighbor: bool = False

    @property
    def key(self) -> str:
        """Name that rows of the same run share."""
        parts = [self.stage, self.arm, self.shape or "alone", self.task]
        parts += [f"rate={self.rate:g}", self.decay, f"seconds={self.seconds:g}"]
        parts += [f"seed={self.seed}", f"block={self.block}"]
        return " ".join(parts + ["neighbor"] * self.neighbor)

    @property
    def expected_seconds(self) -> float:
        """Expected duration, with start and evaluation, where a step takes what it counts as."""
        if self.clock == "wall":
            return self.seconds + (30 if self.evaluated else 12)
        work = self.seconds * (1 + (1 / SHAPES[self.shape].gap if self.shape else 0))
        return 1.2 * work + (35 if self.task == "validation" else 15)

    @property
    def evaluated(self) -> bool:
        """Whether its accuracy is needed."""
        return self.stage != "throughput"


class Store:
    """The rows of each stage, in files of JSON lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, stage: str) -> list[Row]:
        """Return the rows of a stage; a torn last line, as after a kill, is left out."""
        path = self.folder / f"{stage}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def append(self, stage: str, row: Row) -> None:
        """Append a row, on a line of its own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{stage}.jsonl"
        torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size
        if torn:
            path.write_bytes(path.read_bytes().rpartition(b"\n")[0] + b"\n")
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def counting(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the row of each run that counts, by its key: the last one that did not fail."""
    return {row["key"]: row for row in rows if "error" not in row}


def is_due(run: Run, rows: Sequence[Row]) -> bool:
    """Return whether a run is still to be done, or to be repeated."""
    own = [row for row in rows if row["key"] == run.key]
    last = own[-1] if own else None
    if last is not None and "error" not in last:
        return False
    return len(own) < MOST_TRIES


_PYTHON = [sys.executable, "-m"]


def row_of(run: Run, places: Places, core: int = FAST_CORE) -> Row:
    """Do a run, and return its row; that of a failed run has its ``error``.

    Parameters
    ----------
    run : Run
        The run.
    places : Places
        Where the data are.
    core : int
        Core of all processes of a run whose time is counted.
    """
    row: Row = {"key": run.key, **asdict(run), "at": datetime.now(UTC).isoformat("T", "seconds")}
    row["commit"] = conditions()["commit"]
    try:
        row |= _result(run, places, core)
    except _FailedError as error:
        row["error"] = str(error).replace(places.cifar10, "DATA")
    return {key: _rounded(value) for key, value in row.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    return [_rounded(one) for one in value] if isinstance(value, list) else value


class _FailedError(Exception):
    pass


def _result(run: Run, places: Places, core: int) -> Row:
    ours = ARMS[run.arm].kind == "ours"
    module = ("counted" if run.clock == "counted" else "ours") if ours else "loop"
    with tempfile.TemporaryDirectory() as folder:
        work = _our_settings(run, places, core) if ours else _loop_settings(run, places, core)
        work["folder"] = folder
        longest = 6 * run.expected_seconds + _START_SECONDS
        longest += _EVALUATION_SECONDS if run.evaluated else 0
        ranks = range(1 if ours else len(work["batches"]))
        commands = [command(module, {**work, "rank": i} if i else work) for i in ranks]
        alone = dataclasses.replace(run, arm="fast-32", shape="", clock="wall")
        beside = {**_loop_settings(alone, places, SLOW_CORE), "folder": folder, "seconds": 1e6}
        others = [command("loop", beside)] if run.neighbor else []
        return done(commands, Path(folder), longest, others)


def command(module: str, work: Mapping[str, Any]) -> list[str]:
    """Return the command that runs a module of this package with settings."""
    return [*_PYTHON, f"benchmarks.study.{module}", json.dumps(work)]


def done(
    commands: Sequence[list[str]],
    folder: Path,
    longest_seconds: float,
    others: Sequence[list[str]] = (),
) -> Row:
    """Run commands at once, and return the result that the first of them writes."""
    processes = []
    log = folder / "log"
    try:
        for command in [*others, *commands]:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=_ENVIRONMENT,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                )
            processes.append(process)
        for process in processes[len(others) :]:
            process.wait(longest_seconds)
    except subprocess.TimeoutExpired:
        raise _FailedError(f"took longer than {longest_seconds:.0f} s") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            assert process.stdin is not None
            process.stdin.close()
    result = folder / "result.json"
    if any(process.returncode for process in processes[len(others) :]) or not result.exists():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = (lines or ["no output"])[-1].replace(str(ROOT), ".")
        raise _FailedError(reason.replace(str(folder), "FOLDER")[:300])
    found: Row = json.loads(result.read_text())
    return found


def _loop_settings(run: Run, places: Places, core: int = FAST_CORE) -> dict[str, Any]:
    arm = ARMS[run.arm]
    gap, ranks = SHAPES[run.shape].gap if arm.both else 1.0, 2 if arm.both else 1
    counted = run.clock == "counted"
    speeds = [list(STEP_SECONDS), [gap * part for part in STEP_SECONDS]]
    return {
        "task": settings_of(run.task, places),
        "seed": run.seed,
        "rate": run.rate,
        "seconds": run.seconds,
        "cores": [core] * ranks if counted or not arm.both else [FAST_CORE, SLOW_CORE],
        "slowdowns": [1.0, 1.0 if counted else gap][:ranks],
        "batches": [arm.batch, 0][:ranks],
        "step_seconds": speeds[:ranks] if counted else [],
        "evaluate": run.evaluated,
        "decay": run.decay,
        "channels_last": counted,
    }


def _our_settings(run: Run, places: Places, core: int) -> dict[str, Any]:
    arm, shape, task = ARMS[run.arm], SHAPES[run.shape], settings_of(run.task, places)
    settings = {
        "algorithm": "weighted-local-sgd",
        "batch-size": arm.batch,
        "local-steps-fast": shape.steps[0],
        "local-steps-slow": shape.steps[1],
        "learning-rate": run.rate,
        "schedule": run.decay,
        "seconds": run.seconds,
        "epochs": 1_000_000,
        "evaluate-every-epochs": 1_000_000,
        "checkpoint-minutes": 1e6,
        "seed": run.seed,
        "threads": 1,
        **task,
        **arm.settings,
    }
    if settings["algorithm"] == "recommended":  # as it ships
        del settings["local-steps-fast"], settings["local-steps-slow"]
    if run.clock == "counted":
        extra = {"step_seconds": STEP_SECONDS, "seconds": run.seconds, "core": core}
        return {"task": task, "run": settings, "shape": run.shape, **extra}
    workers = f"1x cpu:{FAST_CORE} fast; 1x cpu:{SLOW_CORE} slow slowdown={shape.gap:g}"
    return {"task": task, "run": {**settings, "workers": workers}}
