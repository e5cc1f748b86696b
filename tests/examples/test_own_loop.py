"""examples/own_loop: the commands of its README work, and five lines make a script a worker."""

import json
import shutil
from pathlib import Path

import pytest

from .commands import EXAMPLES
from .scripts import changed, commands_of, difference, printed_difference, python, with_steps

FOLDER = EXAMPLES / "own_loop"


def test_five_lines_make_it_a_worker() -> None:
    lines = difference(FOLDER / "before.py", FOLDER / "after.py")
    assert printed_difference(FOLDER / "README.md") == lines
    assert changed(lines) == 5
    more = difference(FOLDER / "after.py", FOLDER / "complete.py")
    assert changed(more) <= 6


@pytest.mark.processes
def test_commands_of_the_readme(tmp_path: Path) -> None:
    """All but the launch of after.py, whose lines complete.py has, too."""
    folder = Path(shutil.copytree(FOLDER, tmp_path / "own_loop"))
    commands = [
        c for c in commands_of(FOLDER / "README.md") if "launch" not in c or "complete.py" in c
    ]
    assert len(commands) == 3
    *alone, launch = commands
    code = "import runpy, sys\n" + "".join(
        f"sys.argv = {words}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n" for words in alone
    )
    assert "accuracy" in python("-c", code, cwd=folder)
    python(*with_steps(launch, 4, 2), cwd=folder)
    summary = json.loads((folder / "runs" / "complete-1" / "summary.json").read_text())
    assert 480 <= summary["samples"] < 880
    assert all(worker["samples"] > 0 for worker in summary["workers"])
    assert "accuracy" in (folder / "runs" / "complete-1" / "worker-1.log").read_text()
    assert summary["accuracy"] is not None
    assert (folder / "resnet.pt").exists()
