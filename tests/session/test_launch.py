"""``blsgd launch`` with real processes, as a user starts it."""

import contextlib
import csv
import json
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
from flower_blsgd.grids.machine import usable_cores

from ..faults.kill_server import in_session
from ..grids.processes import needs_proc, wait_until
from . import script

SCRIPT = str(Path(script.__file__))
FIRST, LAST = min(usable_cores()), max(usable_cores())
WORKERS = f"1x cpu:{FIRST} fast; 1x cpu:{LAST} slow steps=2 batch=4"
SETTINGS = {"threads": 1, "local-steps-fast": 5, "batch-size": 8, "weights": "per-sample"}

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def command(*arguments: str, workers: str = WORKERS) -> list[str]:
    """Return the command line of ``blsgd launch``."""
    options = [word for key, value in SETTINGS.items() for word in ("-s", f"{key}={value}")]
    launch = [sys.executable, "-m", "flower_blsgd", "launch", "--workers", workers]
    return [*launch, *options, *arguments]


def launch(*arguments: str, workers: str = WORKERS) -> subprocess.CompletedProcess[str]:
    """Run ``blsgd launch`` in the current folder."""
    return subprocess.run(
        command(*arguments, workers=workers),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def summary(run: str = "runs/latest") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(run, "summary.json").read_text())
    return found


def column(run: str | Path, name: str) -> list[float]:
    """Return a column of ``epochs.csv``."""
    with Path(run, "epochs.csv").open(newline="") as lines:
        return [float(row[name]) for row in csv.DictReader(lines)]


def assert_same_model(*runs: str | Path, name: str = "model.safetensors") -> None:
    """Assert that the models of two runs have the same bits."""
    ours, theirs = (load_file(Path(run) / name) for run in runs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_script_trains_the_same_model_as_blsgd_run() -> None:
    done = launch("--rounds", "60", SCRIPT, "", "2")
    assert done.returncode == 0, done.stderr
    task = flower_blsgd.Task(model=script.model, train=script.data(), test=script.data())
    result = flower_blsgd.train(
        task,
        workers=WORKERS,
        rounds=60,
        epochs=1000,
        threads=1,
        local_steps_fast=5,
        batch_size=8,
        weights="per-sample",
        learning_rate=0.1,
        decay_epochs="",
        weight_decay=0.0,
        quiet=True,
    )
    assert_same_model("runs/script-1", result.folder)
    for name in ("rounds", "accuracy"):  # evaluated models, and the best one
        ours, theirs = (column(run, name) for run in ("runs/script-1", result.folder))
        assert ours == pytest.approx(theirs)
        assert len(set(ours)) > 1
    assert_same_model("runs/script-1", result.folder, name="best_model.safetensors")
    assert column("runs/script-1", "learning_rate")[0] == 0.1
    # The scripts end with the final model; the main worker prints here, the other into its log.
    shown = f"accuracy {summary('runs/script-1')['accuracy']:.4f}"
    assert f"rank 0: {shown}" in done.stdout
    assert "rank 1" not in done.stdout
    assert f"rank 1: {shown}" in Path("runs/script-1/worker-1.log").read_text()


def test_a_worker_that_fails_starts_again() -> None:
    done = launch("--samples", "9000", SCRIPT, "raise kill")
    assert done.returncode == 0, done.stderr
    run = summary()
    assert [one["kind"] for one in run["failures"]] == ["raised", "died"], done.stderr
    assert run["samples"] >= 9000
    assert "rank 1: accuracy" in Path("runs/latest/worker-1.log").read_text()
    assert "the script raised RuntimeError: out of luck" in done.stderr


def test_a_device_evaluates_while_the_other_trains() -> None:
    workers = f"1x cpu:{FIRST}; 1x cpu:{LAST} role=evaluate"
    done = launch("--samples", "6000", SCRIPT, workers=workers)
    assert done.returncode == 0, done.stderr
    run = summary()
    assert run["accuracy"] > 0.8
    assert "evaluates while the others train" in done.stdout
    assert "epochs without a result" not in done.stdout


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
def test_a_run_that_was_interrupted_and_killed_resumes_to_the_same_bits() -> None:
    endless = "--samples", "100000000"
    with running(*endless, SCRIPT) as process:
        assert wait_until(last_checkpoint)
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=100)
        assert process.returncode == 130, shown
        assert "launch --resume runs/script-1 script.py ..." in shown
        assert summary()["interrupted"]
    before = last_checkpoint()
    with running("--resume", SCRIPT) as process:
        assert wait_until(lambda: last_checkpoint() > before)
        process.kill()
        process.communicate(timeout=100)  # ends when no process holds its output any more
    rounds = last_checkpoint() + 20
    done = launch("--rounds", str(rounds), "--resume", SCRIPT)
    assert done.returncode == 0, done.stderr
    after = summary("runs/script-1")
    assert (after["rounds"], len(after["resumed"])) == (rounds, 2)
    whole = launch("--rounds", str(rounds), SCRIPT)
    assert whole.returncode == 0, whole.stderr
    assert_same_model("runs/script-1", "runs/script-2")


def test_all_processes_end_with_the_launcher() -> None:
    Path("long.py").write_text("import time\nprint('started', flush=True)\ntime.sleep(600)\n")
    with subprocess.Popen(
        command("--rounds", "3", "long.py"), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line == "started\n")
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout.read() == ""  # ends when no process holds it any more
