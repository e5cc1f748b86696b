"""``blsgd compare`` with real workers: interrupted in the second run, then going on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.devices.worker_spec import parse_workers

from ..command import Command
from ..grids.processes import living, processes_below, wait_until

FIRST, LAST = usable_cores()[0], usable_cores()[-1]
NAMES = ("biased-local-sgd", "weighted-local-sgd")
BUDGET_SECONDS = 1
COMMAND = (
    *("compare", "-c", "digits", "--seeds", "0", "--budget", f"{BUDGET_SECONDS}s"),
    *("--algorithms", ",".join(NAMES)),
    *("--workers", f"1x cpu:{FIRST} fast; 1x cpu:{LAST} slow slowdown=2"),
)
# The command, which measures speeds for a shorter time.
SCRIPT = """
from flower_blsgd.cli.main import main
from flower_blsgd.experiments import calibration

calibration._REPEATS, calibration._ALONE_SECONDS, calibration._ROUND_SECONDS = 2, 0.05, 0.05
raise SystemExit(main())
"""
MARK = f"BLSGD_TEST_OF_COMPARE={uuid.uuid4().hex}"
"""In the environment of the command and of all that it starts."""


def start(folder: Path) -> "subprocess.Popen[str]":
    name, _, value = MARK.partition("=")
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *COMMAND],
        cwd=folder,
        env={**os.environ, name: value, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for pid in living(MARK):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return what every file holds and when it was written."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file())
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_compare_goes_on_after_ctrl_c_in_its_second_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, blsgd: Command
) -> None:
    below = folder / "runs" / "compare-digits"
    first, second = (below / f"{name}-seed0" for name in NAMES)

    process = start(folder)
    rounds = second / "rounds.jsonl"
    assert wait_until(lambda: rounds.exists() or process.poll() is not None, 200)
    process.send_signal(signal.SIGINT)  # as a terminal does, but to this one only
    out, errors = process.communicate(timeout=100)
    assert wait_until(lambda: not living(MARK))
    assert process.returncode == 130
    assert errors.splitlines() == [
        "blsgd: interrupted; all workers have ended",
        "repeat the command to continue; finished runs are kept",
    ]
    lines = out.splitlines()
    assert lines[2:4] == ["all 2 workers together", f"[1/2] {NAMES[0]}, seed 0: training"]
    assert json.loads((second / "summary.json").read_text())["interrupted"] is True
    assert not (below / "comparison.md").exists()
    finished, speeds = contents(first), (below / "workers.toml").read_bytes()

    monkeypatch.chdir(folder)
    before = processes_below()
    lines = blsgd(*COMMAND).splitlines()
    assert wait_until(lambda: processes_below() <= before)
    assert "finished before" in lines[0]
    assert any(line.startswith(f"[2/2] {NAMES[1]}, seed 0: done, accuracy ") for line in lines)
    assert lines[-1] == "in runs/compare-digits: comparison.md, comparison.csv, comparison.png"
    assert contents(first) == finished
    assert (below / "workers.toml").read_bytes() == speeds
    workers = parse_workers(tomllib.loads(speeds.decode())["workers"])
    alone = [worker.seconds_per_step_alone for worker in workers]
    for run in (first, second):
        summary = json.loads((run / "summary.json").read_text())
        assert summary["interrupted"] is False
        assert summary["training_seconds"] >= BUDGET_SECONDS
        # The speeds alone make simulated devices known, with clock = "wall" too.
        assert summary["device_seconds"] > 0
        assert [worker["seconds_per_step_alone"] for worker in summary["workers"]] == alone
        assert summary["predicted"]["round_seconds"] > 0
    assert not (folder / "runs" / "latest").exists()
