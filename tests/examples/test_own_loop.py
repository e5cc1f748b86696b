"""examples/own_loop: the commands of its README work, and five lines make a script a worker."""

import json
import shutil
from pathlib import Path

import pytest

from .commands import EXAMPLES
from .scripts import changed, commands_of, difference, printed_difference, python

FOLDER = EXAMPLES / "own_loop"


def test_five_lines_make_it_a_worker() -> None:
    lines = difference(FOLDER / "before.py", FOLDER / "after.py")
    assert printed_difference(FOLDER / "README.md") == lines
    assert changed(lines) == 5
    more = difference(FOLDER / "after.py", FOLDER / "complete.py")
    assert changed(more) <= 6


@pytest.mark.processes
def test_commands_of_the_readme(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "own_loop"))
    shown = [python(*command, cwd=folder) for command in commands_of(FOLDER / "README.md")]
    assert "accuracy" in shown[1]
    for run, samples in (("after-1", 240), ("complete-1", 480)):
        summary = json.loads((folder / "runs" / run / "summary.json").read_text())
        assert samples <= summary["samples"] < samples + 400
        assert all(worker["samples"] > 0 for worker in summary["workers"])
        assert "accuracy" in (folder / "runs" / run / "worker-1.log").read_text()
    assert summary["accuracy"] is not None  # of complete.py, which evaluates
    assert (folder / "resnet.pt").exists()
