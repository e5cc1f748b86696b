"""The batch script for Slurm, with an `srun` that starts the tasks on this machine."""

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from flower_blsgd.devices.machine import usable_cores
from tests.grids.processes import living, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
MARKER = "BLSGD_SLURM_TEST"
SRUN = """#!/bin/bash
trap 'kill $(jobs -p); wait; exit 143' TERM
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task "$@" &
done
wait
"""


@pytest.mark.full
@pytest.mark.engines
@pytest.mark.timeout(600)
def test_a_job_trains_on_all_tasks_and_leaves_nothing(tmp_path: Path) -> None:
    marker, job = uuid.uuid4().hex, os.getpid()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    for name in ("server", "clients", "configs", "flower_blsgd"):  # Flower's bundles have no links
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    done = subprocess.run(
        ["bash", SCRIPT, "epochs=1", "threads=1", "local-steps-fast=4"],
        env={
            **os.environ,
            "PATH": f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": str(job),
            "SLURM_NTASKS": "2",
            "WORKERS": f"1x cpu:{usable_cores()[0]}",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            MARKER: marker,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    folder = tmp_path / "runs" / f"slurm-{job}"
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "results" / "model.safetensors").exists()
    nodes = (folder / "supernodes.log").read_text()
    assert all(f"node-{task}" in nodes for task in (0, 1))
    assert wait_until(lambda: not living(f"{MARKER}={marker}")), living(f"{MARKER}={marker}")
