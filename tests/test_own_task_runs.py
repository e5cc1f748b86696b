"""`blsgd run` with a task from the current folder, in processes as everybody gets them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from flower_blsgd.runtime.machine import usable_cores

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_task"
CORE = usable_cores()[0]
SETTINGS = (
    "epochs=1 local-steps-fast=10 local-steps-slow=4 batch-size=16 threads=1 seed=3 "
    f"task=own_task:task workers='1x cpu:{CORE} fast; 1x cpu:{CORE} slow'"
)
"""(10 + 4) x 16 = 224 of 2,000 samples a round: 8 rounds."""

TRAP = "raise SystemExit('this is not the library that you look for: ' + __name__)\n"
LIBRARIES = ("queue", "json", "numpy", "torch", "flwr", "flower_blsgd", "clients", "server")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the example, with modules that are named like libraries' beside it."""
    folder = tmp_path_factory.mktemp("example") / "own_task"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    for name in LIBRARIES:
        (folder / f"{name}.py").write_text(TRAP)
    return folder


def blsgd(folder: Path, *arguments: str) -> str:
    """Run the command as its entry point does, which does not look at the current folder."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "flower_blsgd", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def apart(folder: Path) -> tuple[Path, str]:
    told = blsgd(folder, "run", "-c", SETTINGS, "-s", "out=apart")
    return folder / "apart", told


def test_task_of_the_current_folder_is_found_by_all(apart: tuple[Path, str]) -> None:
    run, told = apart
    summary = json.loads((run / "summary.json").read_text())
    assert summary["task"] == "own_task:task"
    assert (summary["rounds"], summary["samples"]) == (8, 8 * 224)
    assert [worker["samples"] for worker in summary["workers"]] == [8 * 160, 8 * 64]
    assert summary["failures"] == []
    assert "2,000 training and 500 test samples" in told
    assert f"test accuracy {summary['accuracy']:.2%}" in told


def test_workers_that_share_a_process_give_the_same_bits(
    folder: Path, apart: tuple[Path, str]
) -> None:
    """Each keeps its own momentum, though the two take turns with one process."""
    blsgd(folder, "run", "-c", SETTINGS, "-s", "out=shared", "-s", "processes-per-device=1")
    ours = load_file(apart[0] / "model.safetensors")
    theirs = load_file(folder / "shared" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert np.isfinite(tensor).all()
        assert tensor.tobytes() == theirs[name].tobytes(), name


def test_evaluate_finds_it_too(folder: Path, apart: tuple[Path, str]) -> None:
    summary = json.loads((apart[0] / "summary.json").read_text())
    told = blsgd(folder, "evaluate", "apart", "--device", "cpu")
    assert told.startswith(f"test accuracy {summary['accuracy']:.2%}, ")
    assert "on 500 samples (apart, computed on cpu)" in told
