"""A server that is killed, or told to end, loses nothing: real processes."""

import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from tests.grids.processes import wait_until

from ..command import Command
from .kill_server import (
    QUICK,
    in_session,
    model_sha256,
    printed,
    rounds_written,
    running,
    wait_for_rounds,
)

pytestmark = pytest.mark.processes


LONGER = (*QUICK, "-s", "epochs=10")
"""Rounds enough, so that the run is not over before the last signal."""


def test_killed_and_told_to_end_it_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blsgd: Command
) -> None:
    """SIGKILL; SIGTERM to all processes, as from a job scheduler; Ctrl-C twice in a slow round.

    The reader of its output ends after the first line, as with ``2>&1 | head -1``.

    The run is resumed after each, and ends with the bits of one that nobody disturbed.
    """
    with running(tmp_path, *LONGER, "-s", "out=run", to_pipe=True) as process:
        assert process.stdout is not None
        assert "built-in app" in process.stdout.readline()
        process.stdout.close()
        assert wait_until(lambda: any((tmp_path / "run" / "checkpoint").glob("round-*")))
        process.kill()
        process.wait()
        assert wait_until(lambda: not in_session(process.pid)), "workers live on"

    with running(tmp_path, "--resume", "run") as process:
        wait_for_rounds(process, tmp_path)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == 143
        assert wait_until(lambda: not in_session(process.pid))
    *_, reason, command = printed(tmp_path)
    assert reason == "blsgd: terminated; all workers have ended"
    program, *arguments = shlex.split(command)
    assert (Path(program).name, arguments) == ("blsgd", ["run", "--resume", "run"])
    before = rounds_written(tmp_path)
    newest = max((tmp_path / "run" / "checkpoint").glob("round-*"))
    assert newest.name.startswith(f"round-{before:09d}.")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["interrupted"] is True

    slow = "cpu fast slowdown=200; cpu slow"
    with running(tmp_path, "--resume", "run", "--workers", slow, "-v") as process:
        assert wait_until(lambda: any(", round " in line for line in printed(tmp_path)))
        busy = json.loads(tmp_path.joinpath("run", "rounds.jsonl").read_text().splitlines()[-1])
        os.killpg(process.pid, signal.SIGINT)
        assert wait_until(lambda: any("finishing the" in line for line in printed(tmp_path)))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert wait_until(lambda: not in_session(process.pid))
    assert printed(tmp_path)[-1] == command
    assert (rounds_written(tmp_path), busy["round"]) == (before, before)

    monkeypatch.chdir(tmp_path)
    blsgd("run", "--resume", "run", "--workers", "auto", warns=True)
    lines = Path("run/rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, 1 + len(lines)))
    blsgd("run", *LONGER, "-s", "out=undisturbed/run")
    assert Path("undisturbed/run/rounds.jsonl").read_text().count("\n") == len(lines)
    assert model_sha256(tmp_path) == model_sha256(tmp_path / "undisturbed")
