"""examples/accelerate: the commands of its README work, and five lines make a script a worker."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from .commands import EXAMPLES
from .scripts import changed, commands_of, difference, printed_difference, python, with_steps

FOLDER = EXAMPLES / "accelerate"


def test_five_lines_make_it_a_worker() -> None:
    lines = difference(FOLDER / "before.py", FOLDER / "after.py")
    assert printed_difference(FOLDER / "README.md") == lines
    assert changed(lines) == 5


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="no accelerate")
def test_launch(tmp_path: Path) -> None:
    """The other commands of the README train without the launcher."""
    folder = Path(shutil.copytree(FOLDER, tmp_path / "accelerate"))
    *_, launch = commands_of(FOLDER / "README.md")
    shown = python(*with_steps(launch, 16, 8), cwd=folder)
    summary = json.loads((folder / "runs" / "latest" / "summary.json").read_text())
    assert summary["failures"] == []
    assert summary["samples"] >= 15000
    assert [worker["batch_size"] for worker in summary["workers"]] == [16, 8]
    shown += (folder / "runs" / "latest" / "worker-1.log").read_text()
    results = re.findall(r"^accuracy ([\d.]+), 1 process on cpu$", shown, re.MULTILINE)
    assert len(results) == 2
    assert results[0] == results[1]  # both end with the averaged model
    assert float(results[0]) > 0.85
