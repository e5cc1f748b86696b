"""``blsgd compare`` as a user has it: real workers, stopped in the middle, and going on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd.runtime.machine import usable_cores

from ..runtime.processes import is_alive, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
FIRST, LAST = usable_cores()[0], usable_cores()[-1]
COMMAND = (
    *("compare", "-c", "digits", "--seeds", "0"),
    *("--algorithms", "biased-local-sgd,weighted-local-sgd"),
    *("--workers", f"1x cpu:{FIRST} fast; 1x cpu:{LAST} slow slowdown=2"),
)
BUDGET_SECONDS = 2
STARTED = (*COMMAND, "--budget", f"{BUDGET_SECONDS}s")
NAMES = ("biased-local-sgd", "weighted-local-sgd")
BELOW = "runs/compare-digits"
_MARKER = "BLSGD_TEST_OF_COMPARE"


class Folder:
    """A working folder in which commands run, all with one mark in their environment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark = uuid.uuid4().hex

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "flower_blsgd", *arguments],
            cwd=self.path,
            env={**os.environ, _MARKER: self._mark, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> list[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=250)
        assert process.returncode == 0, err
        assert err == ""
        assert self.nobody_left()
        return out.splitlines()

    def nobody_left(self) -> bool:
        return wait_until(lambda: not self._members())

    def end_all(self) -> None:
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _members(self) -> list[int]:
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                pid = int(environment.parent.name)
                if f"{_MARKER}={self._mark}".encode() in environment.read_bytes():
                    found += [pid] if is_alive(pid) else []
        return found

    def files(self, below: str) -> dict[str, tuple[bytes, int]]:
        """Return what every file holds and when it was written; not the picture."""
        return {
            str(path.relative_to(self.path)): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in sorted((self.path / below).rglob("*"))
            if path.is_file() and not path.name.startswith("comparison.")
        }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    found = Folder(tmp_path_factory.mktemp("compare"))
    yield found
    found.end_all()


@dataclass
class Stopped:
    """A comparison that was stopped in the second run."""

    told: list[str]
    errors: str
    code: int
    first: dict[str, tuple[bytes, int]]
    """The files of the first run."""
    second: dict[str, Any]
    """The summary of the second."""
    profile: bytes
    table: bool
    """Whether there was one already."""


@pytest.fixture(scope="module")
def stopped(folder: Folder) -> Stopped:
    process = folder.start(*STARTED)
    runs = folder.path / BELOW
    rounds = runs / f"{NAMES[1]}-seed0" / "rounds.jsonl"
    assert wait_until(lambda: rounds.exists() or process.poll() is not None, 200)
    process.send_signal(signal.SIGINT)  # as a terminal does, but to this one only
    out, errors = process.communicate(timeout=100)
    assert folder.nobody_left()
    return Stopped(
        out.splitlines(),
        errors,
        process.returncode,
        folder.files(f"{BELOW}/{NAMES[0]}-seed0"),
        json.loads((rounds.parent / "summary.json").read_text()),
        (runs / "profile.json").read_bytes(),
        (runs / "comparison.md").exists(),
    )


@pytest.fixture(scope="module")
def finished(folder: Folder, stopped: Stopped) -> list[str]:
    """Return what the same command told when it went on."""
    return folder.run(*STARTED)


def test_ctrl_c_in_the_second_run_keeps_the_first(stopped: Stopped) -> None:
    assert stopped.code == 130
    assert stopped.errors == "blsgd: interrupted; all workers have ended\n"
    assert stopped.told[2] == "all 2 workers at once"
    assert stopped.told[3] == "[1/2] biased-local-sgd, seed 0: training"
    (summary,) = [text for name, (text, _) in stopped.first.items() if name.endswith("mary.json")]
    assert json.loads(summary)["interrupted"] is False
    assert stopped.second["interrupted"] is True
    assert not stopped.table


def test_compare_goes_on_and_leaves_a_table(
    folder: Folder, stopped: Stopped, finished: list[str]
) -> None:
    below = folder.path / BELOW
    assert "finished before" in finished[0]
    assert "[2/2] weighted-local-sgd, seed 0: training" in finished
    assert any(
        line.startswith("[2/2] weighted-local-sgd, seed 0: done, accuracy ") for line in finished
    )
    assert finished[-1] == f"in {BELOW}: comparison.md, comparison.csv, comparison.png"
    assert folder.files(f"{BELOW}/{NAMES[0]}-seed0") == stopped.first
    assert (below / "profile.json").read_bytes() == stopped.profile
    for name in ("comparison.md", "comparison.csv", "comparison.png", "profile.json"):
        assert (below / name).stat().st_size > 100
    profile = json.loads(stopped.profile)
    alone = [worker["alone"]["median"] for worker in profile["workers"]]
    for name in NAMES:
        summary = json.loads((below / f"{name}-seed0" / "summary.json").read_text())
        assert summary["interrupted"] is False
        assert summary["training_seconds"] >= BUDGET_SECONDS
        # The speeds alone make simulated devices known, with clock = "wall" too.
        assert summary["device_seconds"] > 0
        assert [worker["seconds_per_step_alone"] for worker in summary["workers"]] == alone
        assert summary["predicted"]["round_seconds"] > 0
    assert not (folder.path / "runs" / "latest").exists()
    assert not (folder.path / "profiles").exists()


def test_compare_again_trains_nothing_and_keeps_the_speeds(
    folder: Folder, finished: list[str]
) -> None:
    before = folder.files("runs")
    again = folder.run(*STARTED)
    assert [line.partition(",")[0] for line in again[:2]] == [
        "[1/2] biased-local-sgd",
        "[2/2] weighted-local-sgd",
    ]
    assert all("finished before" in line for line in again[:2])
    after = folder.files("runs")
    profile = "runs/compare-digits/profile.json"
    assert after.pop(profile)[0] == before.pop(profile)[0]
    assert after == before
