"""One run of the study: what it is, how it is done, and the row that it leaves."""

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
from flower_blsgd.runtime.pinning import ALLOCATOR

from .arms import Arm, arm, why_not
from .link import ADDRESSES, INTERFACE, Link
from .tasks import Places, settings_of

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
FAST_CORE, SLOW_CORE = 0, 1
MOST_TRIES = 3
PROBE_SECONDS, PROBE_TOLERANCE = 2.0, 0.05
STEP_SECONDS = (0.0015, 0.00067)
"""Of a step on the fast device, constant and per sample, where `throughput` has not said it."""

_TEXT_STEP_SECONDS = (0.002, 0.0006)
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
        Of PLAN.md.
    rate, seconds : float
        The learning rate, and the budget.
    gap : float (default: 2.0)
        How much slower the slow device is; 1 where there is none.
    seed : int (default: 0)
        Of everything that is drawn.
    task : str (default: "cifar10")
        As of `tasks.settings_of`.
    clock : {"wall", "device"} (default: "wall")
        Whether time is measured, or counted from given seconds per step; those of the second kind
        need only one core each.
    block : int (default: 0)
        Of repetitions.
    neighbour : bool (default: False)
        Whether the other core computes meanwhile.
    slow_link : bool (default: False)
        Whether the devices are joined by a slow link.
    """

    stage: str
    arm: str
    rate: float
    seconds: float
    gap: float = 2.0
    seed: int = 0
    task: str = "cifar10"
    clock: str = "wall"
    block: int = 0
    neighbour: bool = False
    slow_link: bool = False

    @property
    def key(self) -> str:
        """What rows of the same run have in common."""
        parts = [self.arm, self.task, f"gap={self.gap:g}", f"rate={self.rate:g}"]
        parts += [f"seconds={self.seconds:g}", f"seed={self.seed}", f"block={self.block}"]
        return " ".join(parts + ["neighbour"] * self.neighbour)

    @property
    def expected_seconds(self) -> float:
        """About how long it takes, with its start, its evaluation and its probes."""
        if self.clock == "wall":
            return self.seconds + (26 if self.evaluated else 10)
        work = self.seconds * (1 + (1 / self.gap if arm(self.arm).both else 0))
        return 1.15 * work + 15

    @property
    def evaluated(self) -> bool:
        """Whether its accuracy is wanted."""
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
    """Return the row of each run that counts, by its key: its last one that did not fail."""
    return {row["key"]: row for row in rows if "error" not in row}


def is_due(run: Run, rows: Sequence[Row]) -> bool:
    """Return whether a run is to be done, again perhaps."""
    own = [row for row in rows if row["key"] == run.key]
    last = own[-1] if own else None
    if last is not None and "error" not in last and last.get("steady", True):
        return False
    return len(own) < MOST_TRIES and not why_not(run.arm)


class Probe:
    """A process that says how fast the bare loop is on the fast core just now."""

    def __init__(self, places: Places, seconds: float) -> None:
        settings = _loop_settings(Run("probe", "bare", 0.1, seconds, gap=1), places, ())
        self._process = subprocess.Popen(
            [*_PYTHON, "benchmarks.study.loop", json.dumps({**settings, "probe": True})],
            cwd=ROOT,
            env=_ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def samples_per_second(self) -> float:
        """Return it, as of now."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


_PYTHON = [sys.executable, "-m"]


def row_of(
    run: Run,
    places: Places,
    step_seconds: Sequence[float] = STEP_SECONDS,
    probe: Probe | None = None,
    core: int = FAST_CORE,
) -> Row:
    """Do a run, and return its row; one that fails has its ``error``.

    Parameters
    ----------
    run : Run
        Which.
    places : Places
        Where the data are.
    step_seconds : pair of float
        Of the device clock: seconds of a step, constant and per sample.
    probe : Probe, optional
        Asked before and after.
    core : int
        Of all its processes, on the device clock.
    """
    row: Row = {"key": run.key, **asdict(run), "at": datetime.now(UTC).isoformat("T", "seconds")}
    row["commit"] = conditions()["commit"]
    before = probe.samples_per_second() if probe else None
    try:
        row |= _result(run, places, step_seconds, core)
    except _FailedError as error:
        told = str(error)
        for folder in filter(None, (places.cifar10, places.ag_news)):
            told = told.replace(folder, "DATA")
        row["error"] = told
    if before is not None and probe is not None:
        after = probe.samples_per_second()
        row |= {"probe_before": before, "probe_after": after}
        row["steady"] = abs(after / before - 1) <= PROBE_TOLERANCE
    return {key: _rounded(value) for key, value in row.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    return [_rounded(one) for one in value] if isinstance(value, list) else value


class _FailedError(Exception):
    pass


def _result(run: Run, places: Places, step_seconds: Sequence[float], core: int) -> Row:
    chosen = arm(run.arm)
    counted = _speeds(run, step_seconds) if run.clock == "device" else ()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.kind == "ours":
            work = _our_settings(run, chosen, places, counted, core)
            module = "ours"
        else:
            work = _loop_settings(run, places, counted, core)
            module = "loop"
        work["folder"] = folder
        longest = 3 * run.expected_seconds + _START_SECONDS
        longest += _EVALUATION_SECONDS if run.evaluated else 0
        if run.slow_link:
            with Link() as link:
                measured = link.measured()
                commands = _at_both_ends(link, module, work)
                return {**_done(commands, Path(folder), longest), **measured}
        ranks = range(len(work["batches"])) if module == "loop" else range(1)
        commands = [_command(module, {**work, "rank": i} if i else work) for i in ranks]
        beside = _loop_settings(run, places, (), SLOW_CORE) | {"folder": folder, "seconds": 1e6}
        others = [_command("loop", beside)] if run.neighbour else []
        return _done(commands, Path(folder), longest, others)


def _command(module: str, work: Mapping[str, Any]) -> list[str]:
    return [*_PYTHON, f"benchmarks.study.{module}", json.dumps(work)]


def _done(
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


def _speeds(run: Run, step_seconds: Sequence[float]) -> list[list[float]]:
    """Return the given seconds of a step, constant and per sample, of each device."""
    fast = list(_TEXT_STEP_SECONDS if run.task == "ag-news" else step_seconds)
    slow = [run.gap * part for part in fast]
    return [fast, slow] if arm(run.arm).both else [fast]


def _loop_settings(
    run: Run, places: Places, counted: Sequence[Sequence[float]], core: int = FAST_CORE
) -> dict[str, Any]:
    chosen = arm(run.arm)
    slow_batch = 0 if chosen.proportional else chosen.batch
    ranks = 2 if chosen.both else 1
    together = run.clock == "device" or not chosen.both
    return {
        "task": settings_of(run.task, places),
        "seed": run.seed,
        "rate": run.rate,
        "seconds": run.seconds,
        "cores": [core] * ranks if together else [FAST_CORE, SLOW_CORE],
        "slowdowns": [1.0, 1.0 if run.clock == "device" else run.gap][:ranks],
        "batches": [chosen.batch, slow_batch][:ranks],
        "step_seconds": counted,
        "evaluate": run.evaluated,
    }


def _our_settings(
    run: Run, chosen: Arm, places: Places, counted: Sequence[Sequence[float]], core: int
) -> dict[str, Any]:
    task = settings_of(run.task, places)
    if counted:
        seconds = [constant + per_sample * chosen.batch for constant, per_sample in counted]
        cores = core, core
        options = [f" seconds-per-step={s:.6g}" for s in seconds]
    else:
        cores, options = (FAST_CORE, SLOW_CORE), ["", f" slowdown={run.gap:g}"]
    groups = zip(("fast", "slow"), cores, options, strict=False)
    workers = [f"1x cpu:{i} {tier}{more}" for tier, i, more in groups]
    settings = {
        "workers": "; ".join(workers[: 2 if chosen.both else 1]),
        "batch-size": chosen.batch,
        "local-steps-fast": (8 if places.tiny else 32) if run.task != "ag-news" else 16,
        "local-steps-slow": "auto",
        "learning-rate": run.rate,
        "seconds": run.seconds,
        "epochs": 1_000_000,
        "evaluate-every-epochs": 1_000_000,
        "checkpoint-minutes": 1e6,
        "clock": run.clock,
        "seed": run.seed,
        "threads": 1,
    }
    whole = {**settings, **task, **chosen.settings}
    return {"task": task, "run": whole, "core": core if counted else None}


def _at_both_ends(link: Link, module: str, work: dict[str, Any]) -> list[list[str]]:
    """Return what runs at the ends: the ranks, or what starts both of our nodes."""
    if module == "loop":
        address = {"address": f"tcp://{ADDRESSES[0]}:4712", "interface": INTERFACE}
        return [
            [*link.inside(end), *_command("loop", {**work, **address, "rank": end})]
            for end in range(2)
        ]
    slowdown = work["run"]["workers"].rpartition("slowdown=")[2]
    nodes = [
        f"device='cpu:{FAST_CORE}' tier='fast'",
        f"device='cpu:{SLOW_CORE}' tier='slow' slowdown={float(slowdown)}",
    ]
    given = {**work, "nodes": nodes, "far": link.inside(1)}
    del given["run"]["workers"]
    given["run"] |= {"transport": "stream", "stream-address": f"{ADDRESSES[0]}:4713"}
    return [[*link.inside(0), *_command("deployed", given)]]
