"""The tutorials and how-to pages: their programs run, as their readers would start them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ROOT = DOCS.parent


def write_programs(page: str, folder: Path) -> str:
    """Write the blocks that begin with ``# NAME.py`` into a folder; return the page."""
    text = (DOCS / page).read_text()
    for name, program in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(program)
    return text


def run(line: str, folder: Path) -> str:
    """Run a command line of a page; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "flower_blsgd", *shlex.split(line)[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands_of(text: str) -> list[str]:
    """Return the lines of all shell blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.processes
@pytest.mark.parametrize("page", ["how-to/add-a-sampler.md", "how-to/add-a-weighting.md"])
def test_own_part_trains(page: str, tmp_path: Path) -> None:
    (line,) = commands_of(write_programs(page, tmp_path))
    assert "epoch 2/2  accuracy" in run(line, tmp_path)


@pytest.mark.processes
def test_own_loop_trains_on_two_devices(tmp_path: Path) -> None:
    _, launch, on_gpus = commands_of(write_programs("tutorials/own-loop.md", tmp_path))
    assert "cuda:1" in on_gpus
    output = run(launch.replace("15000", "3000"), tmp_path)
    assert float(re.findall(r"^accuracy ([\d.]+)$", output, re.MULTILINE)[-1]) > 0.8
    assert (tmp_path / "model.pt").exists()


def test_lines_that_the_tutorials_show_are_those_of_the_examples() -> None:
    """Blocks without a file name are parts of the examples."""
    for page, example in (
        ("tutorials/lora.md", "lora/train.py"),
        ("tutorials/from-fedavg.md", "your_own_app/after/own_digits/server_app.py"),
        ("tutorials/from-fedavg.md", "your_own_app/after/own_digits/client_app.py"),
    ):
        code = (ROOT / "examples" / example).read_text()
        known = {line.strip() for line in code.splitlines()}
        blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
        assert any({line.strip() for line in block.splitlines()} <= known for block in blocks)
