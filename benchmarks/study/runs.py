"""One run of the study: what it is, how it is done, and the row that it leaves."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.taken_under import conditions
from flower_blsgd.devices.pinning import ALLOCATOR

from .arms import FAST_CORE, SLOW_CORE, Setting
from .link import ADDRESSES, INTERFACE, Link
from .tasks import Places, settings_of

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
MOST_TRIES = 3

MACHINE = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
"""Of a start of this machine; another machine may be twice as fast."""

STEADY, FEWEST_STEADY = 0.93, 4
"""Share of the median samples of its arm that a run must have, once there are so many."""

_OTHER_SECONDS, _LINK_SECONDS = 10.0, 13.0
"""Start and evaluation of a run, and what Flower's engine adds to them."""

_LONGEST_OTHER_SECONDS = 400.0
"""Start and evaluation never take longer, so a run that does hangs."""

ENVIRONMENT = {**os.environ, **ALLOCATOR, "PYTHONPATH": str(ROOT)}
"""The allocator's settings that workers of this project have make every loop a quarter faster."""


@dataclass(frozen=True)
class Run:
    """A run of an arm of a stage of PLAN3.md.

    The `seed` of a timing is its block. `link` is whether a slow link joins the devices,
    `validated` whether the data to tune on are used, and `neighbor` whether the other core computes
    in the meantime.
    """

    stage: str
    arm: str
    kind: str
    task: str
    setting: Setting
    seconds: float
    gap: float
    seed: int
    link: bool = False
    validated: bool = False
    neighbor: bool = False

    @property
    def key(self) -> str:
        """Name that rows of the same run share."""
        parts = [self.stage, self.arm, f"gap={self.gap:g}", str(self.setting)]
        parts += [f"seconds={self.seconds:g}", f"seed={self.seed}"]
        return " ".join(parts + ["link"] * self.link + ["neighbor"] * self.neighbor)

    @property
    def expected_seconds(self) -> float:
        """Expected duration, with start and evaluation."""
        return self.seconds + _OTHER_SECONDS + _LINK_SECONDS * self.link


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


def on_one_machine(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that may be compared: of each seed, and of each arm that is tuned.

    They are those of the machine with the last one, so what was begun on one machine is repeated on
    another.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        names = ("kind", "gap") if row["validated"] and row["stage"] != "auto" else ("seed",)
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    kept: list[Row] = []
    for own in groups.values():
        kept += [row for row in own if row["machine"] == own[-1]["machine"]]
    return kept


def is_due(run: Run, rows: Sequence[Row], most_tries: int = MOST_TRIES) -> bool:
    """Return whether a run is still to be done, or to be repeated."""
    own = [row for row in rows if row["key"] == run.key]
    if own and "error" not in own[-1] and not _is_unsteady(own[-1], rows):
        return False
    return len(own) < most_tries


def _is_unsteady(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether a run trained on far fewer samples than others of its arm and budget."""
    same = ("arm", "gap", "setting", "seconds", "neighbor", "link", "machine")
    every = counting(rows).values()
    samples = [one["samples"] for one in every if all(one[key] == row[key] for key in same)]
    return len(samples) >= FEWEST_STEADY and row["samples"] < STEADY * median(samples)


class FailedError(Exception):
    """A run failed; the text has the last lines of its output."""


def row_of(run: Run, places: Places) -> Row:
    """Do a run, and return its row; that of a failed run has its ``error``."""
    row: Row = {"key": run.key, **asdict(run), "at": datetime.now(UTC).isoformat("T", "seconds")}
    row |= {"commit": conditions()["commit"], "machine": MACHINE}
    try:
        return row | _result(run, places)
    except FailedError as error:
        return {**row, "error": str(error).replace(places.cifar10, "DATA")}


def _result(run: Run, places: Places) -> Row:
    is_loop = run.kind in ("loop", "ddp")
    work = loop_settings(run, places) if is_loop else our_settings(run, places)
    longest = 6 * run.expected_seconds + _LONGEST_OTHER_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        work["folder"] = folder
        if run.link:
            with Link() as link:
                return done(_at_both_ends(link, run, work), Path(folder), longest)
        ranks = range(len(work["batches"])) if is_loop else (0,)
        module = "loop" if is_loop else "ours"
        commands = [command(module, {**work, "rank": rank}) for rank in ranks]
        others = []
        if run.neighbor:
            other = loop_settings(replace(run, setting=Setting(0.05, 32), seconds=1e6), places)
            others.append(command("loop", {**other, "cores": [SLOW_CORE], "folder": folder}))
        return done(commands, Path(folder), longest, others)


def command(module: str, work: Mapping[str, Any]) -> list[str]:
    """Return the command that runs a module of this package with settings."""
    return [sys.executable, "-m", f"benchmarks.study.{module}", json.dumps(work)]


def done(
    commands: Sequence[list[str]],
    folder: Path,
    longest_seconds: float,
    others: Sequence[list[str]] = (),
) -> Row:
    """Run commands at once, and return the result that the first of them writes.

    FailedError if one fails or takes too long. `others` run in the meantime.
    """
    processes = []
    log = folder / "log"
    pipe, waited_for = subprocess.PIPE, len(others)
    try:
        for command in [*others, *commands]:
            with log.open("ab") as out:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=ENVIRONMENT, stdin=pipe, stdout=out, stderr=out
                )
            processes.append(process)
        for process in processes[waited_for:]:
            process.wait(longest_seconds)
    except subprocess.TimeoutExpired:
        raise FailedError(f"took longer than {longest_seconds:.0f} s") from None
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
    if any(process.returncode for process in processes[waited_for:]) or not result.exists():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        codes = f"exit codes {[process.returncode for process in processes]}"
        reason = " | ".join([*lines[-3:], codes]).replace(str(folder), "FOLDER")
        raise FailedError(reason.replace(str(ROOT), ".")[:500])
    found: Row = json.loads(result.read_text())
    return found


def loop_settings(run: Run, places: Places) -> dict[str, Any]:
    """Return the settings of `loop` for a run."""
    one, ranks = run.setting, 2 if run.kind == "ddp" else 1
    return {
        "task": settings_of(run.task, places, run.validated),
        "seed": run.seed,
        "rate": one.rate,
        "seconds": run.seconds,
        "cores": [FAST_CORE, SLOW_CORE][:ranks],
        "gaps": [1, round(run.gap)][:ranks],
        "batches": [one.batch, 0][:ranks],
        "accumulate": one.accumulate,
        "sync_bn": one.sync_bn,
        "nearest": run.task != "images",
        "wire": one.wire,
        "outer": [one.steps, one.outer_rate, one.outer_momentum] if one.outer_rate else None,
    }


def our_settings(run: Run, places: Places) -> dict[str, Any]:
    """Return the settings of `ours` for a run; those of newer versions only where they are used."""
    one, task = run.setting, settings_of(run.task, places, run.validated)
    settings: dict[str, Any] = {
        "algorithm": "recommended",
        "batch-size": one.batch,
        "learning-rate": one.rate,
        "schedule": "linear",
        "seconds": run.seconds,
        "epochs": 1_000_000,
        "evaluate-every-epochs": 1_000_000,
        "checkpoint-minutes": 1e6,
        "seed": run.seed,
        "threads": 1,
        "workers": f"1x cpu:{FAST_CORE} fast; 1x cpu:{SLOW_CORE} slow slowdown={run.gap:g}",
        **task,
    }
    if run.kind == "gradients":
        settings["average"] = "gradients"
        slow = round(one.batch / run.gap)
        if run.task != "images" and slow > 1:  # else the batch is the mean of the devices'
            settings["steps"] = "one"
            settings["workers"] = (
                f"1x cpu:{FAST_CORE} fast batch={one.batch}; "
                f"1x cpu:{SLOW_CORE} slow slowdown={run.gap:g} batch={slow}"
            )
    elif one.steps:
        settings["local-steps-fast"] = one.steps
        settings["local-steps-slow"] = max(1, int(one.steps / run.gap + 1e-9))
    if run.kind == "models":
        settings["weights"] = one.weights
    if one.overlap:
        settings["overlap"] = True
    if one.outer_rate:
        settings["outer-optimizer"] = "nesterov" if one.outer_momentum else "sgd"
        settings["outer-learning-rate"] = one.outer_rate
        settings["outer-momentum"] = one.outer_momentum
    if one.wire != "float32":
        settings["wire-dtype"] = one.wire
    return {"task": task, "run": settings}


def _at_both_ends(link: Link, run: Run, work: dict[str, Any]) -> list[list[str]]:
    """Return what runs at the ends: the ranks, or what starts both of our nodes."""
    if run.kind == "ddp":
        address = {"address": f"tcp://{ADDRESSES[0]}:4712", "interface": INTERFACE}
        ranks = (command("loop", {**work, **address, "rank": end}) for end in range(2))
        return [[*link.inside(end), *words] for end, words in enumerate(ranks)]
    nodes = [
        f"device='cpu:{FAST_CORE}' tier='fast'",
        f"device='cpu:{SLOW_CORE}' tier='slow' slowdown={run.gap}",
    ]
    del work["run"]["workers"]
    work["run"] |= {"transport": "stream", "stream-address": f"{ADDRESSES[0]}:4713"}
    given = {**work, "nodes": nodes, "far": link.inside(1)}
    return [[*link.inside(0), *command("ours", given)]]
