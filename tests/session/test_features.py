"""What larger scripts use works under ``blsgd launch``."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

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
    final, (inputs, targets) = script.model(), script.data()
    saved = load_file("runs/latest/model.safetensors")
    final.load_state_dict({".".join(name.split(".")[-2:]): t for name, t in saved.items()})
    accuracy = (final(inputs).argmax(1) == targets).float().mean().item()
    assert [float(number) for number in shown] == pytest.approx([accuracy], abs=1e-4)
    assert accuracy > 0.7
