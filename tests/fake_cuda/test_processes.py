"""Runs on two emulated cards: of our own app, and of scripts under ``blsgd launch``."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..examples.commands import EXAMPLES, ROOT
from ..examples.scripts import run_alone
from .environment import emulated
from .log import process_logs

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


def on_two_cards(folder: Path, *arguments: str, **settings: str) -> tuple[str, dict[str, Any]]:
    """Run a command; return its output, and the summary of the run in ``run``.

    Each worker's process must use its own card and nothing of the other.
    """
    log = folder / "log"
    log.mkdir()
    environment = emulated(log=str(log), **settings)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    used = [{card for card, peak in p.peak_bytes.items() if peak} for p in process_logs(log)]
    assert sorted(map(tuple, filter(None, used))) == [(0,), (1,)]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert [worker["device"] for worker in summary["workers"]] == ["cuda:0", "cuda:1"]
    assert all(worker["samples"] > 0 for worker in summary["workers"])
    return done.stdout + done.stderr, summary


def test_run_on_unequal_cards_of_which_one_refuses(tmp_path: Path) -> None:
    """It has no memory for a context, so its process cannot even make it the current device."""
    options = ["task=digits", "workers=auto", "min-workers=2", "rounds=3", "local-steps-fast=8"]
    given = [word for option in (*options, "out=run") for word in ("-s", option)]
    words = ["-m", "flower_blsgd", "run", str(ROOT), *given]
    cards = {"devices": "3", "memory": "1e9,1e9,0", "kernel_us": "100,3000"}
    output, summary = on_two_cards(tmp_path, *words, **cards)
    fast, slow = (worker["local_steps"] for worker in summary["workers"])
    assert slow < fast == 8
    reason = "cuda:2 cannot be used: CUDA error: out of memory"
    refused = f"blsgd: fast-2 (cuda:2) does not take part: {reason}"
    assert output.splitlines().count(refused) == 1
    assert "failures: fast-2 (cuda:2) raised, starting 1" in output
    assert [failure["reason"] for failure in summary["failures"]] == [reason]


@pytest.mark.full
def test_own_loop(tmp_path: Path) -> None:
    for file in (EXAMPLES / "own_loop").glob("*.py"):
        shutil.copy(file, tmp_path)
    run_alone([str(tmp_path), "parts.py", "images"])
    workers = ["--workers", "1x cuda:0 fast; 1x cuda:1 slow", "--samples", "96"]
    settings = ["batch-size=16", "local-steps-fast=2", "local-steps-slow=1", "out=run"]
    options = [*workers, *(word for setting in settings for word in ("-s", setting))]
    words = ["-m", "flower_blsgd", "launch", *options, "complete.py", "images"]
    _, summary = on_two_cards(tmp_path, *words)
    assert summary["failures"] == []
    assert "accuracy" in (tmp_path / "run" / "worker-1.log").read_text()
