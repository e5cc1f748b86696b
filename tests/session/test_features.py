"""What larger scripts use works under ``blsgd launch``."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flower_blsgd.launch import launch

from . import script
from .test_launch import FIRST, LAST, config

FEATURES = str(Path(script.__file__).with_name("features.py"))

pytestmark = pytest.mark.processes


def test_features_work_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    workers = f"1x cpu:{FIRST}; 1x cpu:{LAST} slowdown=2"  # whose speeds are measured
    settings = {"workers": workers, "local-steps-fast": "auto"}
    run = launch(FEATURES, [], config(rounds=20, **settings))
    assert run.summary["failures"] == []
    assert all(worker["samples"] > 0 for worker in run.summary["workers"])
    log = Path("runs/latest/worker-1.log").read_text()
    shown = re.findall(r"rank 1: accuracy ([\d.]+)", log)
    final, (inputs, targets) = script.model(), script.data()
    saved = load_file("runs/latest/model.safetensors")
    final.load_state_dict({".".join(name.split(".")[-2:]): t for name, t in saved.items()})
    accuracy = (final(inputs).argmax(1) == targets).float().mean().item()
    assert [float(number) for number in shown] == pytest.approx([accuracy], abs=1e-4)
    assert accuracy > 0.7
    # Every step of a script is one of the run, so its schedule and its best model are right.
    lines = Path("runs/latest/rounds.jsonl").read_text().splitlines()
    rounds = [json.loads(line) for line in lines]
    steps = [[row["completed_steps"] for row in record["workers"]] for record in rounds]
    taken, best, best_round = re.findall(r"steps (\d+), best (\S+) after round (\d+)", log)[0]
    assert int(taken) == sum(own for _, own in steps)
    assert (steps[0], float(best) >= accuracy - 1e-4, int(best_round) >= 1) == ([1, 1], True, True)
    rates = [0.1 * 0.999 ** (sum(main for main, _ in steps[: i + 1]) - 1) for i in range(20)]
    assert [record["learning_rate"] for record in rounds] == pytest.approx(rates)
    shown = capsys.readouterr().out
    # Once for each worker; on a busy machine, either may be the faster one.
    assert len(re.findall(r"-[01] \S+: \S+ s a step measured, gamma \d\.\d\d", shown)) == 2
    assert len(re.findall(r"local-steps-fast = auto: \d+; a round takes", shown)) == 1
    assert run.history.predicted is not None
