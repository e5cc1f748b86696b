"""What larger scripts use works under ``blsgd launch``."""

import re
from pathlib import Path

import pytest

from flower_blsgd.launch import launch

from . import script
from .test_launch import config

FEATURES = str(Path(script.__file__).with_name("features.py"))

pytestmark = pytest.mark.processes


def test_features_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = "compile accumulate clip scaler checkpoint fork gloo"
    monkeypatch.chdir(tmp_path)
    run = launch(FEATURES, features.split(), config(rounds=40))
    assert run.summary["failures"] == []
    assert all(worker["samples"] > 0 for worker in run.summary["workers"])
    shown = re.findall(r"rank 1: accuracy ([\d.]+)", Path("runs/latest/worker-1.log").read_text())
    assert len(shown) == 1
    assert float(shown[0]) > 0.7
