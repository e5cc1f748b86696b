"""Kill a real ``blsgd run`` at random moments and resume it, as often as wanted."""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.grids.processes import is_alive, wait_until

BLSGD = [sys.executable, "-m", "flower_blsgd"]
QUICK = ("-c", "digits", *(f"-s{x}" for x in ("epochs=4", "threads=1", "checkpoint-minutes=1e-4")))
"""Eight short rounds with a checkpoint after each; its last model is the same on every machine."""


@contextlib.contextmanager
def running(
    folder: Path, *arguments: str, to_pipe: bool = False
) -> Iterator["subprocess.Popen[str]"]:
    """Start ``blsgd run`` in a folder and a session of its own; it prints to ``log`` or a pipe."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*BLSGD, "run", *arguments],
            cwd=folder,
            stdout=subprocess.PIPE if to_pipe else log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def printed(folder: Path) -> list[str]:
    """Return the lines that the last command of a folder printed."""
    return (folder / "log").read_text().splitlines()


def in_session(session: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                found.append(int(stat.parent.name))
    return [pid for pid in found if is_alive(pid)]


def model_sha256(folder: Path) -> str:
    """Return the SHA-256 of the model in ``run``."""
    return hashlib.sha256((folder / "run" / "model.safetensors").read_bytes()).hexdigest()


def run_to_its_end(folder: Path, *arguments: str) -> str:
    """Run ``blsgd run`` to its end; return the SHA-256 of the model in ``run``."""
    with running(folder, *arguments) as process:
        code = process.wait()
    assert code == 0, printed(folder)
    return model_sha256(folder)


def rounds_written(folder: Path) -> int:
    """Return how many whole lines ``rounds.jsonl`` has."""
    try:
        return (folder / "run" / "rounds.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def wait_for_rounds(process: "subprocess.Popen[str]", folder: Path, more: int = 0) -> None:
    """Wait until this process has trained a round, and so many more, or is over."""

    def over() -> bool:
        return process.poll() is not None

    assert wait_until(lambda: any("steps per round" in line for line in printed(folder)) or over())
    goal = rounds_written(folder) + more
    assert wait_until(lambda: rounds_written(folder) >= goal or over())


def kill_and_resume(
    folder: Path, draws: random.Random, kills: int = 1, arguments: Sequence[str] = QUICK
) -> str:
    """Train with SIGKILLs of the server at random moments, resumed after each, to the end.

    Parameters
    ----------
    folder : Path
        Empty; the run is in ``run`` there.
    draws : random.Random
        Draws the moments: before the first round or in training, up to its last round.
    kills : int (default: 1)
        How many. One that comes before the first checkpoint begins the run anew.
    arguments : sequence of str
        Of the ``blsgd run`` that begins it.

    Returns
    -------
    str
        The SHA-256 of the model that is left.
    """
    attempt = 0
    for _ in range(kills):
        resumes = any((folder / "run" / "checkpoint").glob("round-*"))
        if not resumes and (folder / "run").exists():
            (folder / "run").rename(folder / f"lost-{(attempt := attempt + 1)}")
        again = ("--resume", "run") if resumes else (*arguments, "-s", "out=run")
        with running(folder, *again) as process:
            if draws.random() < 0.2:
                time.sleep(draws.uniform(0, 3))
            else:
                wait_for_rounds(process, folder, draws.randrange(3))
                time.sleep(draws.uniform(0, 0.2))
            process.kill()
            process.wait()
            assert wait_until(lambda: not in_session(process.pid)), "workers live on"
    if any((folder / "run" / "checkpoint").glob("round-*")):
        with running(folder, "--resume", "run") as process:
            code = process.wait()
        finished = code == 2 and "is finished" in printed(folder)[-1]
        assert code == 0 or finished, printed(folder)
        return model_sha256(folder)
    if (folder / "run").exists():
        (folder / "run").rename(folder / "lost")
    return run_to_its_end(folder, *arguments, "-s", "out=run")
