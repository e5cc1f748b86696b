"""Kill runs, or one of their workers, at random moments, and look at what is left.

``python -m tests.runtime.kill_runs 100 [SEED]``
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from .processes import is_alive, wait_until

REPOSITORY = Path(__file__).parents[2]
EARLIEST, LATEST = 0.5, 10.0
LONGEST_RUN_SECONDS = 250.0
LONGEST_AFTERLIFE_SECONDS = 60.0

_MARKER = "BLSGD_KILL_RUNS"
SETTINGS = ("epochs=3", "workers=1x cpu:0 fast name=hare; 1x cpu:1 slow name=tortoise")
_TOLD = re.compile(r"worker (hare|tortoise)\b.*\bdied \(signal SIGKILL\)")


@dataclass
class Outcome:
    """What became of one run."""

    victim: str
    """"parent", "worker", or "" if the run was over before."""
    seconds: float
    """When it was killed, after the start."""
    told: str = ""
    """The line about a dead worker."""
    output: str = field(default="", repr=False)
    faults: list[str] = field(default_factory=list)


def kill_one(random_: random.Random, victim: str, settings: tuple[str, ...] = SETTINGS) -> Outcome:
    """Start a run, kill it or a worker of it, and say what was wrong afterwards."""
    marker, shared_before = uuid.uuid4().hex, _shared_files()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/output", "w+") as output:
        assignments = [part for setting in settings for part in ("-s", setting)]
        run = subprocess.Popen(
            [sys.executable, "-m", "flower_blsgd", "run", REPOSITORY, "-c", "digits", *assignments],
            cwd=folder,
            env={**os.environ, _MARKER: marker, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            outcome = _kill(run, marker, random_, victim)
            if outcome.victim == "parent":
                run.wait()
            elif run.wait(LONGEST_RUN_SECONDS) != 0:
                outcome.faults.append(f"the run ended with {run.returncode}")
        except subprocess.TimeoutExpired:
            outcome = Outcome(victim, 0.0, faults=["the run hangs"])
        finally:
            with contextlib.suppress(ProcessLookupError):
                run.kill()
            run.wait()
        if not wait_until(lambda: not _members(marker), LONGEST_AFTERLIFE_SECONDS):
            outcome.faults.append(f"still alive: {_members(marker)}")
            for pid in _members(marker):
                os.kill(pid, signal.SIGKILL)
        if left := _unheld(_shared_files() - shared_before):
            outcome.faults.append(f"left in shared memory: {left}")
        output.seek(0)
        outcome.output = output.read()
    _read(outcome)
    return outcome


def _kill(
    run: "subprocess.Popen[bytes]", marker: str, random_: random.Random, victim: str
) -> Outcome:
    start = time.monotonic()
    moment = random_.uniform(EARLIEST, LATEST)
    while time.monotonic() < start + moment and run.poll() is None:
        time.sleep(0.005)
    pid = run.pid
    if victim == "worker":
        wait_until(lambda: run.poll() is not None or _workers(marker), LONGEST_RUN_SECONDS)
        workers = _workers(marker)
        if workers and moment < EARLIEST + (LATEST - EARLIEST) / 2:
            # Most of these have waited for a worker to start; not all should die newly born.
            time.sleep(random_.uniform(0.0, 6.0))
            workers = _workers(marker)
        pid = random_.choice(workers) if workers else 0
    if run.poll() is not None or not pid:
        return Outcome("", time.monotonic() - start)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return Outcome(victim, time.monotonic() - start)


def _read(outcome: Outcome) -> None:
    lines = outcome.output.splitlines()
    outcome.told = next((line for line in lines if _TOLD.search(line)), "")
    done = any(line.startswith("done:") for line in lines)
    if outcome.victim == "parent":
        return
    if not done:
        outcome.faults.append("the run did not get to its end")
    if outcome.victim == "worker" and not outcome.told:
        outcome.faults.append("no line names the worker and the signal")
    if outcome.victim == "worker" and "Traceback" in outcome.output:
        outcome.faults.append("a traceback")


def _members(marker: str) -> list[int]:
    """Return the living processes that inherited this run's environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            pid = int(environment.parent.name)
            if f"{_MARKER}={marker}".encode() in environment.read_bytes() and is_alive(pid):
                found.append(pid)
    return sorted(found)


def _workers(marker: str) -> list[int]:
    found = []
    for pid in _members(marker):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"flower_blsgd.runtime.worker_process" in command:
                found.append(pid)
    return found


def _shared_files() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _unheld(names: set[str]) -> set[str]:
    """Leave out what some process still holds: other programs use shared memory as well."""
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            names = {name for name in names if name not in text}
    return names


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    random_, bad = random.Random(seed), 0
    victims: dict[str, int] = {}
    for number in range(count):
        outcome = kill_one(random_, random_.choice(["parent", "worker"]))
        victims[outcome.victim] = victims.get(outcome.victim, 0) + 1
        bad += bool(outcome.faults)
        told = f"; {outcome.told}" if outcome.told else ""
        print(
            f"{number + 1}: {outcome.victim or 'over before'} at {outcome.seconds:.2f} s{told}",
            flush=True,
        )
        if outcome.faults:
            print(f"  FAULTS {outcome.faults}\n{outcome.output}", flush=True)
    print(f"{count} runs, {victims}, {bad} with faults")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
