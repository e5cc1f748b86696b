"""``blsgd compare`` as a user has it: real workers, stopped in the middle, and going on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

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
ONE_EPOCH = (*COMMAND, "--budget", "1epochs")
LONG_RUNS = (*COMMAND, "--budget", "2s", "--out", "stopped")
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
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert err == ""
        assert self.nobody_left()
        return out.splitlines()

    def nobody_left(self) -> bool:
        return wait_until(lambda: not self._members(), 10)

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


@pytest.fixture(scope="module")
def told(folder: Folder) -> list[str]:
    """Return what the first comparison told."""
    return folder.run(*ONE_EPOCH)


def test_compare_measures_trains_and_leaves_a_table(folder: Folder, told: list[str]) -> None:
    below = folder.path / "runs" / "compare-digits"
    assert told[2] == "all 2 workers at once"
    assert told[3] == "[1/2] biased-local-sgd, seed 0: training"
    assert told[6].startswith("[2/2] weighted-local-sgd, seed 0: done, accuracy ")
    assert told[-1] == "in runs/compare-digits: comparison.md, comparison.csv, comparison.png"
    for name in ("comparison.md", "comparison.csv", "comparison.png", "profile.json"):
        assert (below / name).stat().st_size > 100
    summaries = [
        json.loads((below / f"{name}-seed0" / "summary.json").read_text())
        for name in ("biased-local-sgd", "weighted-local-sgd")
    ]
    profile = json.loads((below / "profile.json").read_text())
    alone = [worker["alone"]["median"] for worker in profile["workers"]]
    for summary in summaries:
        assert summary["interrupted"] is False
        assert summary["epochs"] == 1
        # The speeds alone make simulated devices known, with clock = "wall" too.
        assert summary["device_seconds"] > 0
        assert [worker["seconds_per_step_alone"] for worker in summary["workers"]] == alone
        assert summary["predicted"]["round_seconds"] > 0
    assert not (folder.path / "runs" / "latest").exists()
    assert not (folder.path / "profiles").exists()


def test_compare_again_trains_nothing_and_keeps_the_speeds(folder: Folder, told: list[str]) -> None:
    before = folder.files("runs")
    began = time.monotonic()
    again = folder.run(*ONE_EPOCH)
    assert time.monotonic() - began < 60
    assert [line.partition(",")[0] for line in again[:2]] == [
        "[1/2] biased-local-sgd",
        "[2/2] weighted-local-sgd",
    ]
    assert all("finished before" in line for line in again[:2])
    after = folder.files("runs")
    profile = "runs/compare-digits/profile.json"
    assert after.pop(profile)[0] == before.pop(profile)[0]
    assert after == before


def test_ctrl_c_in_the_second_run_and_going_on(folder: Folder, told: list[str]) -> None:
    speeds = ("-s", "profile=runs/compare-digits/profile.json")
    process = folder.start(*LONG_RUNS, *speeds)
    first, second = (
        folder.path / "stopped" / f"{name}-seed0"
        for name in ("biased-local-sgd", "weighted-local-sgd")
    )
    assert wait_until((second / "rounds.jsonl").exists, 120), process.poll()
    process.send_signal(signal.SIGINT)  # as a terminal does, but to this one only
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "blsgd: interrupted; all workers have ended\n"
    assert folder.nobody_left()
    assert json.loads((first / "summary.json").read_text())["interrupted"] is False
    assert json.loads((second / "summary.json").read_text())["interrupted"] is True
    assert not (folder.path / "stopped" / "comparison.md").exists()

    kept = folder.files("stopped/biased-local-sgd-seed0")
    lines = folder.run(*LONG_RUNS, *speeds)
    assert "finished before" in lines[0]
    assert lines[1] == "[2/2] weighted-local-sgd, seed 0: training"
    assert folder.files("stopped/biased-local-sgd-seed0") == kept
    summary = json.loads((second / "summary.json").read_text())
    assert summary["interrupted"] is False
    assert summary["training_seconds"] >= 2
    assert (folder.path / "stopped" / "comparison.md").is_file()
