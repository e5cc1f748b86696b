"""A server that is killed, or told to end, loses nothing: real processes."""

import json
import os
import random
import shlex
import signal
from pathlib import Path

import pytest

from tests.grids.processes import wait_until

from .kill_server import (
    QUICK,
    in_session,
    kill_and_resume,
    printed,
    rounds_written,
    run_to_its_end,
    running,
    wait_for_rounds,
)

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the SHA-256 of the model that the run leaves if nobody disturbs it."""
    return run_to_its_end(tmp_path_factory.mktemp("undisturbed"), *QUICK, "-s", "out=run")


def test_killed_at_five_random_moments_and_resumed_it_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: str
) -> None:
    assert kill_and_resume(tmp_path, random.Random(5), kills=5) == undisturbed
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, 9))


def test_signals_let_the_round_finish_and_end_with_the_command_that_resumes(
    tmp_path: Path, undisturbed: str
) -> None:
    """SIGTERM to all processes, as from a job scheduler; Ctrl-C twice in a slow round; the end."""
    with running(tmp_path, *QUICK, "-s", "out=run") as process:
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
        assert wait_until(lambda: any(" of 2" in line for line in printed(tmp_path)))
        busy = json.loads(tmp_path.joinpath("run", "rounds.jsonl").read_text().splitlines()[-1])
        os.killpg(process.pid, signal.SIGINT)
        assert wait_until(lambda: any("finishing the" in line for line in printed(tmp_path)))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert wait_until(lambda: not in_session(process.pid))
    assert printed(tmp_path)[-1] == command
    assert (rounds_written(tmp_path), busy["round"]) == (before, before)
    assert run_to_its_end(tmp_path, "--resume", "run", "--workers", "auto") == undisturbed
