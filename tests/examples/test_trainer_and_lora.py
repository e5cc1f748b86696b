"""examples/hf_trainer and examples/lora: the commands in their READMEs, word for word."""

import difflib
import importlib.util
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from .commands import EXAMPLES, ROOT, run
from .scripts import with_steps

if not all(map(importlib.util.find_spec, ("transformers", "accelerate", "peft"))):
    pytest.skip("needs the extra lora", allow_module_level=True)

# The folder has a sitecustomize.py; it says why.
PATHS = Path(f"{ROOT}{os.pathsep}{Path(__file__).parent / 'site'}")


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of the example whose name is the parameter."""
    return Path(shutil.copytree(EXAMPLES / request.param, tmp_path / "example"))


def launch(folder: Path) -> tuple[str, dict[str, Any]]:
    """Run the README's ``blsgd launch``; return the output, and the summary of the run."""
    text = (folder / "README.md").read_text()
    (command,) = re.findall(r"^    blsgd (launch .+)$", text, re.MULTILINE)
    words = with_steps(shlex.split(command), 16, 8)
    output = run("-m", "flower_blsgd", *words, cwd=folder, path=PATHS)
    return output, json.loads((folder / "runs/latest/summary.json").read_text())


def test_the_readme_shows_the_difference() -> None:
    example = EXAMPLES / "hf_trainer"
    before, after = ((example / f"{name}.py").read_text() for name in ("before", "train"))
    names = "before.py", "train.py"
    lines = list(
        difflib.unified_diff(before.splitlines(), after.splitlines(), *names, n=1, lineterm="")
    )
    shown = "\n".join("@@" if line.startswith("@@") else line for line in lines)
    assert f"```diff\n{shown}\n```" in (example / "README.md").read_text()
    changed = [line for line in lines[2:] if line[0] in "+-" and len(line) > 1]
    assert len(changed) == 2


@pytest.mark.processes
@pytest.mark.parametrize("folder", ["hf_trainer"], indirect=True)
def test_trainer_trains_on_two_workers(folder: Path) -> None:
    output, summary = launch(folder)
    assert summary["accuracy"] > 0.9
    assert len(re.findall(r"^accuracy .+ after \d+ steps$", output, re.MULTILINE)) == 1
    log = (folder / "runs/latest/worker-1.log").read_text()
    assert "accuracy" not in log
    assert "Traceback" not in log
    # The budget decides: the Trainer itself would stop after 4 x 640 = 2560 samples of a worker.
    both = [worker["samples"] for worker in summary["workers"]]
    assert sum(both) == summary["samples"] >= 4000
    assert min(both) > 0
    assert (folder / "out/model/model.safetensors").exists()


@pytest.mark.processes
@pytest.mark.parametrize("folder", ["lora"], indirect=True)
def test_lora(folder: Path) -> None:
    output, summary = launch(folder)
    (shown,) = re.findall(r"^    (each worker sends .+)$", (folder / "README.md").read_text(), re.M)
    assert output.count(shown) == 1
    assert output.count("\nloss ") == 1
    both = [worker["samples"] for worker in summary["workers"]]
    assert sum(both) == summary["samples"] >= 2400
    assert min(both) > 0
    saved = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert saved["peft_type"] == "LORA"
