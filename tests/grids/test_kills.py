"""Runs of the command that are killed, or lose a worker, at a random moment."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .processes import living, not_held, shared_files, wait_until

REPOSITORY = Path(__file__).parents[2]
LONGEST_RUN_SECONDS = 250.0
MARKER = "BLSGD_KILL_RUNS"
"""An environment variable that all processes of a run inherit."""
RUNS = (("parent", 9, "epochs=1000"), ("worker", 4, "epochs=5"))
"""Who is killed, a seed of the moment, and in which run: nobody is killed after the end."""
DEAD_WORKER = re.compile(r"worker (hare|tortoise)\b.*\bdied \(signal SIGKILL\)")


@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="this system has no /proc")
def test_killed_runs_leave_nothing_and_lost_workers_are_reported(tmp_path: Path) -> None:
    shared_before = shared_files()
    with ThreadPoolExecutor(2) as two_at_a_time:
        jobs = [two_at_a_time.submit(kill_one, tmp_path, *run) for run in RUNS]
    assert [job.result() for job in jobs] == [[], []]
    assert not not_held(shared_files() - shared_before)


def kill_one(tmp_path: Path, victim: str, seed: int, epochs: str) -> list[str]:
    """Start a run, kill it or a worker of it, and return what was wrong afterwards."""
    mark, folder, code = f"{MARKER}={uuid.uuid4().hex}", tmp_path / victim, -1
    faults: list[str] = []
    folder.mkdir()
    workers = "workers=1x cpu:0 fast name=hare; 1x cpu:1 slow name=tortoise"
    command = [sys.executable, "-m", "flower_blsgd", "run", REPOSITORY, "-c", "digits"]
    with open(folder / "output", "w+") as output:
        run = subprocess.Popen(
            [*command, "-s", epochs, "-s", workers],
            cwd=folder,
            env={**os.environ, MARKER: mark.partition("=")[2], "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            kill(run, mark, random.Random(seed), victim)
            code = run.wait(LONGEST_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            faults.append("the run hangs")
        finally:
            with contextlib.suppress(ProcessLookupError):
                run.kill()
            run.wait()
        if not wait_until(lambda: not living(mark)):
            faults.append(f"still alive: {living(mark)}")
            for pid in living(mark):
                os.kill(pid, signal.SIGKILL)
        output.seek(0)
        text = output.read()
    if victim == "worker":
        if code != 0 or not re.search("^done:", text, re.MULTILINE):
            faults.append("the run did not get to its end")
        if not DEAD_WORKER.search(text):
            faults.append("no line names the worker and the signal")
        if "Traceback" in text:
            faults.append("a traceback")
    return [*faults, text] if faults else []


def kill(run: "subprocess.Popen[bytes]", mark: str, random_: random.Random, victim: str) -> None:
    """Kill a run or one of its workers, once there is one, at a random moment."""
    deadline = time.monotonic() + random_.uniform(0.5, 10.0)
    while victim == "parent" and time.monotonic() < deadline:
        time.sleep(0.005)
    pid = run.pid
    if victim == "worker":
        wait_until(lambda: run.poll() is not None or workers(mark), LONGEST_RUN_SECONDS)
        time.sleep(random_.uniform(0.0, 1.0))  # not all should die newly born
        pid = random_.choice(workers(mark))
    assert run.poll() is None, "the run was over before"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def workers(mark: str) -> list[int]:
    """Return those of them that are worker processes."""
    found = []
    for pid in living(mark):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "blsgd-worker":
                found.append(pid)
    return found
