"""examples/lightning: two lines make it a worker, and under ``blsgd launch`` it trains."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from .commands import EXAMPLES
from .scripts import changed, commands_of, difference, printed_difference, python, with_steps

FOLDER = EXAMPLES / "lightning"


def test_two_lines_make_it_a_worker() -> None:
    lines = difference(FOLDER / "before.py", FOLDER / "after.py")
    assert printed_difference(FOLDER / "README.md") == lines
    assert changed(lines) == 2


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="no lightning")
def test_launch(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "lightning"))
    *_, launch = commands_of(FOLDER / "README.md")
    shown = python(*with_steps(launch, 16, 8), cwd=folder)
    summary = json.loads((folder / "runs" / "latest" / "summary.json").read_text())
    assert summary["failures"] == []
    assert summary["samples"] >= 12000
    assert all(worker["samples"] > 0 for worker in summary["workers"])
    (accuracy,) = re.findall(r"^accuracy ([\d.]+), best", shown, re.MULTILINE)
    assert float(accuracy) > 0.85
    # Only the main worker writes files and prints the result.
    assert [path.name for path in folder.rglob("version_*")] == ["version_0"]
    assert len(list((folder / "checkpoints").iterdir())) == 1
    assert "accuracy" not in (folder / "runs" / "latest" / "worker-1.log").read_text()
