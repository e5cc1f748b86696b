"""The tutorials and how-to pages: their programs and commands run."""

import re
import shlex
from pathlib import Path

import pytest

from flower_blsgd.cli.main import parser_with
from flower_blsgd.cli.options import own_settings
from flower_blsgd.devices.worker_spec import parse_workers
from flower_blsgd.parts import check_workers

from ..command import Command
from ..examples.commands import EXAMPLES, ROOT, run
from ..examples.scripts import with_steps

DOCS = ROOT / "docs"
PROGRAM = re.compile(r"^# (\w+\.py)\n")
NUM_DIGITS = 1437
"""Training samples of the task that commands without a task train on."""


def blocks_of(page: str, language: str) -> list[str]:
    """Return the blocks of code of a page, also those in lists."""
    fence = rf"^( *)```{language}\n(.*?)^\1```"
    found = re.findall(fence, (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def programs_of(page: str, folder: Path) -> dict[str, str]:
    """Write the blocks that begin with ``# NAME.py`` into a folder; return their texts."""
    found = {}
    for block in blocks_of(page, "python"):
        if named := PROGRAM.match(block):
            found[named[1]] = block
            (folder / named[1]).write_text(block)
    return found


def commands_of(page: str) -> list[str]:
    """Return the command lines of a page, continued ones joined, without comments."""
    text = "\n".join(blocks_of(page, "bash")).replace("\\\n", " ")
    return [line.partition("  #")[0].strip() for line in text.splitlines() if line]


def test_runs_of_the_pages_can_start_with_their_workers() -> None:
    """For example, a sampler that needs a slow worker has one. Nothing is trained."""
    checked = 0
    for page in sorted((DOCS / "how-to").glob("*.md")) + sorted((DOCS / "tutorials").glob("*.md")):
        for line in commands_of(str(page.relative_to(DOCS))):
            words = shlex.split(line)
            if words[0] != "blsgd" or words[1] not in ("run", "calibrate", "plan", "compare"):
                continue
            options = parser_with(words[1:2]).parse_args(words[1:])
            is_ours = getattr(options, "app", None) in (None, ".")
            if options.workers and is_ours:
                config = own_settings(options)
                check_workers(config, parse_workers(config.workers, anywhere=True), NUM_DIGITS)
                checked += 1
    assert checked >= 7


@pytest.mark.processes
def test_own_sampler_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blsgd: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    programs_of("how-to/add-a-sampler.md", tmp_path)
    (line,) = commands_of("how-to/add-a-sampler.md")
    assert "epoch 2/2  accuracy" in blsgd(*shlex.split(line)[1:])


@pytest.mark.processes
def test_own_weighting_trains_and_its_run_is_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blsgd: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    programs_of("how-to/add-a-weighting.md", tmp_path)
    (line,) = commands_of("how-to/add-a-weighting.md")
    assert "epoch 2/2  accuracy" in blsgd(*shlex.split(line)[1:])
    (block,) = blocks_of("how-to/resume.md", "python")
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    exec("import flower_blsgd\n" + block.replace("30", "3"), names)
    assert len((tmp_path / "runs/digits-1/epochs.csv").read_text().splitlines()) == 1 + 3


@pytest.mark.processes
def test_own_loop_trains_on_two_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs = programs_of("tutorials/own-loop.md", tmp_path)
    exec(programs["plain.py"].replace("range(10)", "range(1)"), {})
    assert float(capsys.readouterr().out.removeprefix("accuracy ")) > 0.5
    _, launch, on_gpus = commands_of("tutorials/own-loop.md")
    assert "cuda:1" in on_gpus
    words = with_steps(shlex.split(launch.replace("15000", "3000"))[1:], 16, 8)
    output = run("-m", "flower_blsgd", *words, cwd=tmp_path)
    assert float(re.findall(r"^accuracy ([\d.]+)$", output, re.MULTILINE)[-1]) > 0.8
    assert (tmp_path / "model.pt").exists()


def test_changes_that_the_own_loop_shows_are_those_of_its_scripts(tmp_path: Path) -> None:
    programs = programs_of("tutorials/own-loop.md", tmp_path)
    before, after = (programs[name].splitlines() for name in ("plain.py", "train.py"))
    diffs = blocks_of("tutorials/own-loop.md", "diff")
    lines = [line for block in diffs for line in block.splitlines()]
    assert {line[0] for line in lines} == {"+", "-", " "}
    for sign, line in ((line[0], line[1:]) for line in lines):
        assert (line in before, line in after) == (sign != "+", sign != "-"), line


@pytest.mark.parametrize(
    ("page", "examples"),
    [
        ("tutorials/lora.md", ["lora/train.py"]),
        (
            "tutorials/from-fedavg.md",
            [f"your_own_app/after/own_digits/{app}_app.py" for app in ("server", "client")],
        ),
    ],
)
def test_lines_that_tutorials_show_are_those_of_the_examples(
    page: str, examples: list[str]
) -> None:
    texts = [(EXAMPLES / example).read_text().splitlines() for example in examples]
    known = [{line.strip() for line in text} for text in texts]
    blocks = [b for b in blocks_of(page, "python") if "OWNER/NAME" not in b]
    assert len(blocks) == len(examples)
    for block in blocks:
        shown = {line.strip() for line in block.splitlines()}
        assert any(shown <= lines for lines in known), block


def test_lora_is_started_as_in_its_readme() -> None:
    lines = [line.strip() for line in (EXAMPLES / "lora/README.md").read_text().splitlines()]
    folder, launch = commands_of("tutorials/lora.md")[2:4]
    assert lines.index(launch) == lines.index(folder) + 1
