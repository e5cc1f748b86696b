"""The texts of the command line: overview, help of each command, versions."""

import itertools
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from flower_blsgd.cli import main as cli
from flower_blsgd.cli.commands import COMMANDS, GROUPS
from flower_blsgd.flower.app_folder import built_in_app, run_config

from .conftest import Printed

EXAMPLES = [line for command in COMMANDS.values() for line in command.epilog.splitlines()[2::2]]


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_overview_fits_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert len(lines) <= 24 - 2  # a line for the command, and one for the next prompt
    assert max(map(len, lines)) < 80
    for title, group in GROUPS.items():
        at = lines.index(f"{title}:") if title else 0
        for name in group if title else ():
            assert name in lines[(at := at + 1)]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_the_purpose_and_ends_with_two_examples(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    usage, purpose, *_, examples = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: blsgd {name}")
    assert purpose == COMMANDS[name].text
    assert max(map(len, purpose.splitlines())) < 80
    title, *lines = examples.rstrip("\n").splitlines()
    assert title == "examples:"
    assert [line[:4] for line in lines[::2]] == ["  # "] * 2
    assert all(f"{line} ".startswith(f"  blsgd {name} ") for line in lines[1::2])


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_understood(folder: Path, example: str) -> None:
    (folder / "ca.crt").touch()
    words = shlex.split(example.partition(" >")[0])[1:]
    options = cli._parser(words).parse_args(words)
    if hasattr(options, "run_config"):
        run_config(built_in_app(), options.run_config, options.set)
    for option, value in itertools.pairwise(words):
        assert option != "--vary" or value.partition("=")[0] in built_in_app().config


def test_version_lists_what_a_report_of_an_error_needs(printed: Printed) -> None:
    lines = printed("--version")
    assert lines[0] == version("flower-blsgd")  # alone, for scripts
    assert lines[1].startswith("Python 3.")
    assert lines[2:4] == [f"torch {version('torch')}", f"flwr {version('flwr')}"]
    assert len(lines) == 5  # no accelerator
    assert lines[4].startswith("cpu:")


def test_help_is_shown_without_slow_imports() -> None:
    code = (
        "import sys; from flower_blsgd.cli.main import main\n"
        "main([]); slow = {'torch', 'flwr', 'numpy', 'rich', 'shtab'} & sys.modules.keys()\n"
        "sys.exit(str(slow) if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
