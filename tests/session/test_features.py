"""What larger scripts use works under ``blsgd launch``."""

import re
from pathlib import Path

import pytest

from . import script
from .test_launch import launch, summary

FEATURES = str(Path(script.__file__).with_name("features.py"))

pytestmark = pytest.mark.processes


def test_features_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = "compile accumulate clip scaler checkpoint fork gloo"
    monkeypatch.chdir(tmp_path)
    done = launch("--rounds", "40", FEATURES, *features.split())
    assert done.returncode == 0, done.stderr
    run = summary()
    assert run["failures"] == []
    assert all(worker["samples"] > 0 for worker in run["workers"])
    logs = done.stdout + Path("runs/latest/worker-1.log").read_text()
    shown = dict(re.findall(r"rank (\d): accuracy ([\d.]+)", logs))
    assert shown.keys() == {"0", "1"}
    assert shown["0"] == shown["1"]  # the final model
    assert float(shown["0"]) > 0.7
