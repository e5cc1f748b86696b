"""``blsgd launch`` with real processes."""

import contextlib
import csv
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import flower_blsgd
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.launch import _WorkerLogs
from flower_blsgd.launch import launch as launch_script

from ..faults.kill_server import in_session
from ..grids.processes import needs_proc, wait_until
from ..log_capture import captured_log
from . import script

SCRIPT = str(Path(script.__file__))
FIRST, LAST = min(usable_cores()), max(usable_cores())
WORKERS = f"1x cpu:{FIRST} fast steps=5; 1x cpu:{LAST} slow steps=2 batch=4"
SETTINGS = {"threads": 1, "local-steps-fast": 5, "batch-size": 8, "weights": "per-sample"}

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def command(*arguments: str) -> list[str]:
    """Return the command line of ``blsgd launch``."""
    options = [word for key, value in SETTINGS.items() for word in ("-s", f"{key}={value}")]
    launch = [sys.executable, "-m", "flower_blsgd", "launch", "--workers", WORKERS]
    return [*launch, *options, *arguments]


def config(**more: Any) -> RunConfig:
    """Return the same settings for `launch_script`, and some more."""
    return RunConfig.from_run_config({"workers": WORKERS, "epochs": 10**6, **SETTINGS, **more})


def summary(run: str = "runs/latest") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(run, "summary.json").read_text())
    return found


def column(run: str | Path, name: str) -> list[float]:
    """Return a column of ``epochs.csv``."""
    with Path(run, "epochs.csv").open(newline="") as lines:
        return [float(row[name]) for row in csv.DictReader(lines)]


def test_a_worker_that_fails_starts_again_while_another_one_evaluates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = f"1x cpu:{FIRST}; 1x cpu:{LAST}; 1x cpu:{LAST} role=evaluate"
    with captured_log() as log:
        run = launch_script(SCRIPT, ["raise kill"], config(samples=9000, workers=workers))
    assert [one["kind"] for one in run.summary["failures"]] == ["raised", "died"], log.lines()
    assert run.summary["samples"] >= 9000
    assert run.summary["accuracy"] > 0.8
    assert "rank 1: accuracy" in Path("runs/latest/worker-1.log").read_text()
    said = "\n".join(log.lines(logging.WARNING))
    assert "the script raised RuntimeError: out of luck" in said
    shown = capsys.readouterr().out
    assert "evaluates while the others train" in shown
    assert "epochs without a result" not in shown


@contextlib.contextmanager
def running(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Start ``blsgd launch`` in a session of its own; in the end, none of its processes lives."""
    with subprocess.Popen(
        command(*arguments), stdout=-1, stderr=-1, text=True, start_new_session=True
    ) as process:
        try:
            yield process
            assert wait_until(lambda: not in_session(process.pid)), "processes live on"
        finally:
            for pid in in_session(process.pid):
                os.kill(pid, signal.SIGKILL)


def last_checkpoint() -> int:
    """Return the round of the newest checkpoint of the run; 0 without one."""
    folders = Path("runs/script-1/checkpoint").glob("round-*")
    return max((int(re.findall(r"\d+", folder.name)[0]) for folder in folders), default=0)


@needs_proc
@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_that_was_interrupted_and_killed_trains_the_same_model_as_blsgd_run(
    overlap: bool,
) -> None:
    setting = f"overlap={str(overlap).lower()}"
    with running("--samples", "100000000", "-s", setting, SCRIPT) as process:
        assert wait_until(last_checkpoint)
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=100)
        assert process.returncode == 130, shown
        assert "launch --resume runs/script-1 script.py ..." in shown
        assert summary()["interrupted"]
        assert "at exit" in Path("runs/latest/worker-1.log").read_text()
    before = last_checkpoint()
    with running("--resume", SCRIPT) as process:
        assert wait_until(lambda: last_checkpoint() > before)
        process.kill()
        process.communicate(timeout=100)  # ends when no process holds its output any more
    rounds = last_checkpoint() + 20
    with running("--rounds", str(rounds), "--resume", SCRIPT, "", "2") as process:
        shown, errors = process.communicate(timeout=250)
        assert process.returncode == 0, errors
    after = summary("runs/script-1")
    assert (after["rounds"], len(after["resumed"]), after["failures"]) == (rounds, 2, [])
    task = flower_blsgd.Task(model=script.model, train=script.data(), test=script.data())
    result = flower_blsgd.train(
        task,
        workers=WORKERS,
        rounds=rounds,
        epochs=10**6,
        threads=1,
        local_steps_fast=5,
        batch_size=8,
        weights="per-sample",
        overlap=overlap,
        learning_rate=0.1,
        decay_epochs="",
        weight_decay=0.0,
        quiet=True,
    )
    ours, theirs = (
        load_file(Path(r, "model.safetensors")) for r in ("runs/script-1", result.folder)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    found, expected = (
        dict(zip(column(run, "rounds"), column(run, "accuracy"), strict=True))
        for run in ("runs/script-1", result.folder)
    )  # the interrupted run evaluated one model more
    assert {number: found[number] for number in expected} == pytest.approx(expected)
    assert len(set(expected.values())) > 1
    assert column("runs/script-1", "learning_rate")[0] == 0.1
    # The scripts end with the final model; the main worker prints here, the other into its log.
    accuracy = f"accuracy {after['accuracy']:.4f}"
    assert f"rank 0: {accuracy}" in shown
    assert "rank 1" not in shown
    assert f"rank 1: {accuracy}" in Path("runs/script-1/worker-1.log").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is none on this system")
def test_a_full_disk_loses_only_the_log_of_a_worker(tmp_path: Path) -> None:
    logs = _WorkerLogs()
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    for rank in (0, 1):
        logs.add(rank, "a line")
    logs.write_to(tmp_path)
    assert (tmp_path / "worker-1.log").read_text() == "a line\n"
