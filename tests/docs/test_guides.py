"""The tutorials and how-to pages: their programs run, as their readers would start them."""

import re
import shlex
from pathlib import Path

import pytest

from ..examples.commands import EXAMPLES, ROOT, run

DOCS = ROOT / "docs"


def write_programs(page: str, folder: Path) -> str:
    """Write the blocks that begin with ``# NAME.py`` into a folder; return the page."""
    text = (DOCS / page).read_text()
    for name, program in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(program)
    return text


def blsgd(line: str, folder: Path) -> str:
    """Run a command line of a page; return its output."""
    return run("-m", "flower_blsgd", *shlex.split(line)[1:], cwd=folder)


def commands_of(text: str) -> list[str]:
    """Return the lines of all shell blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.processes
@pytest.mark.parametrize("page", ["how-to/add-a-sampler.md", "how-to/add-a-weighting.md"])
def test_own_part_trains(page: str, tmp_path: Path) -> None:
    (line,) = commands_of(write_programs(page, tmp_path))
    assert "epoch 2/2  accuracy" in blsgd(line, tmp_path)


@pytest.mark.processes
def test_own_loop_trains_on_two_devices(tmp_path: Path) -> None:
    _, launch, on_gpus = commands_of(write_programs("tutorials/own-loop.md", tmp_path))
    assert "cuda:1" in on_gpus
    output = blsgd(launch.replace("15000", "3000"), tmp_path)
    assert float(re.findall(r"^accuracy ([\d.]+)$", output, re.MULTILINE)[-1]) > 0.8
    assert (tmp_path / "model.pt").exists()


def test_lines_that_the_tutorials_show_are_those_of_the_examples() -> None:
    """Blocks without a file name are parts of the examples."""
    for page, example in (
        ("tutorials/lora.md", "lora/train.py"),
        ("tutorials/from-fedavg.md", "your_own_app/after/own_digits/server_app.py"),
        ("tutorials/from-fedavg.md", "your_own_app/after/own_digits/client_app.py"),
    ):
        code = (EXAMPLES / example).read_text()
        known = {line.strip() for line in code.splitlines()}
        blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
        assert any({line.strip() for line in block.splitlines()} <= known for block in blocks)
