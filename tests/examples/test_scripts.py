"""Scripts of the examples: few lines make them workers, and they train alone and when launched."""

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from .commands import EXAMPLES
from .scripts import (
    changed,
    commands_of,
    difference,
    printed_difference,
    python,
    run_alone,
    with_steps,
)

LIBRARIES = {
    "own_loop": "torchvision",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "hf_trainer": "transformers",
    "lora": "peft",
}
"""What each example needs, of which all but the first are optional."""


@pytest.mark.parametrize(
    ("name", "after", "lines"),
    [
        ("own_loop", "after.py", 5),
        ("accelerate", "after.py", 5),
        ("lightning", "after.py", 2),
        ("hf_trainer", "train.py", 2),
    ],
)
def test_few_lines_make_it_a_worker(name: str, after: str, lines: int) -> None:
    folder = EXAMPLES / name
    found = difference(folder / "before.py", folder / after)
    assert printed_difference(folder / "README.md") == found
    assert changed(found) == lines
    if name == "own_loop":
        assert changed(difference(folder / after, folder / "complete.py")) <= 6


def is_there(name: str) -> bool:
    return importlib.util.find_spec(LIBRARIES[name]) is not None


@pytest.mark.processes
def test_they_train_alone(tmp_path: Path) -> None:
    commands = []
    for name in filter(is_there, LIBRARIES):
        folder = str(shutil.copytree(EXAMPLES / name, tmp_path / name))
        if name == "own_loop":
            commands.append([folder, "parts.py", "images"])
            commands.append([folder, "complete.py", "images", "--steps", "2"])
        else:
            commands.append([folder, commands_of(Path(folder, "README.md"))[-1][-1]])
    for (_, script, *_), text in zip(commands, run_alone(*commands), strict=True):
        assert script == "parts.py" or re.search(r"^(accuracy|loss) \d", text, re.MULTILINE), text


def check_own_loop(folder: Path, shown: str, log: str, summary: dict[str, Any]) -> None:
    assert summary["samples"] < 880
    assert summary["accuracy"] is not None
    assert "accuracy" in log
    assert (folder / "resnet.pt").exists()


def check_accelerate(folder: Path, shown: str, log: str, summary: dict[str, Any]) -> None:
    assert [worker["batch_size"] for worker in summary["workers"]] == [16, 8]
    printed = r"^accuracy ([\d.]+), 1 process on cpu$"
    one, other = re.findall(printed, shown + log, re.MULTILINE)
    assert one == other  # both end with the averaged model
    assert float(one) > 0.85


def check_lightning(folder: Path, shown: str, log: str, summary: dict[str, Any]) -> None:
    (accuracy,) = re.findall(r"^accuracy ([\d.]+), best", shown, re.MULTILINE)
    assert float(accuracy) > 0.85
    # Only the main worker writes files and prints the result.
    assert [path.name for path in folder.rglob("version_*")] == ["version_0"]
    assert len(list((folder / "checkpoints").iterdir())) == 1
    assert "accuracy" not in log


def check_hf_trainer(folder: Path, shown: str, log: str, summary: dict[str, Any]) -> None:
    """The budget decides: the Trainer itself would stop after 4 x 640 samples of a worker."""
    assert summary["accuracy"] > 0.9
    assert len(re.findall(r"^accuracy .+ after \d+ steps$", shown, re.MULTILINE)) == 1
    assert "accuracy" not in log
    assert (folder / "out/model/model.safetensors").exists()


def check_lora(folder: Path, shown: str, log: str, summary: dict[str, Any]) -> None:
    (line,) = re.findall(r"^    (each worker sends .+)$", (folder / "README.md").read_text(), re.M)
    assert shown.count(line) == 1
    assert shown.count("\nloss ") == 1
    saved = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert saved["peft_type"] == "LORA"


CHECKS = {
    "own_loop": check_own_loop,
    "accelerate": check_accelerate,
    "lightning": check_lightning,
    "hf_trainer": check_hf_trainer,
    "lora": check_lora,
}


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("name", LIBRARIES)
def test_they_train_as_workers(name: str, tmp_path: Path) -> None:
    if not is_there(name):
        pytest.skip(f"needs {LIBRARIES[name]}")
    folder = Path(shutil.copytree(EXAMPLES / name, tmp_path / name))
    launch = commands_of(folder / "README.md")[-1]
    if name == "own_loop":
        run_alone([str(folder), "parts.py", "images"])
    steps = (4, 2) if name == "own_loop" else (16, 8)
    shown = python(*with_steps(launch, *steps), cwd=folder)
    run = folder / "runs" / "latest"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["failures"] == []
    samples = [worker["samples"] for worker in summary["workers"]]
    assert min(samples) > 0
    assert sum(samples) == summary["samples"] >= int(launch[launch.index("--samples") + 1])
    log = (run / "worker-1.log").read_text()
    assert "Traceback" not in log
    CHECKS[name](folder, shown, log, summary)
