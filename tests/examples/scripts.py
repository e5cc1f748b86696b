"""How the tests run the scripts of examples, and count the lines that make them workers."""

import difflib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from .commands import ROOT

SITE = Path(__file__).with_name("site")
"""Contains a sitecustomize.py, which every Python process imports at its start."""


def python(*arguments: str, cwd: Path) -> str:
    """Run Python, which must succeed; return both outputs."""
    paths = [str(SITE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def commands_of(readme: Path) -> list[list[str]]:
    """Return the indented commands of a README, as arguments of Python."""
    lines = re.findall(r"^    ((?:python|blsgd) .*)$", readme.read_text(), re.MULTILINE)
    programs = {"python": [], "blsgd": ["-m", "flower_blsgd"]}
    return [[*programs[first], *rest] for first, *rest in map(shlex.split, lines)]


def with_steps(command: list[str], fast: int, slow: int) -> list[str]:
    """Return a launch with given steps: measuring keeps both cores busy for seconds."""
    before = command.index("launch") + 1
    steps = ["-s", f"local-steps-fast={fast}", "-s", f"local-steps-slow={slow}"]
    return [*command[:before], *steps, *command[before:]]


def difference(before: Path, after: Path) -> list[str]:
    """Return the difference of two files without its headers and blank lines."""
    texts = [path.read_text().splitlines() for path in (before, after)]
    lines = list(difflib.unified_diff(*texts, n=1, lineterm=""))[2:]
    return [line if line[0] != "@" else "@@" for line in lines if line.strip("+ ")]


def changed(difference: list[str]) -> int:
    """Return the number of new or changed lines; none may only be removed."""
    return sum(line[0] == "+" for line in difference)


def printed_difference(readme: Path) -> list[str]:
    """Return the difference that a README prints, as `difference` does."""
    block = r"```diff\n---[^\n]*\n\+\+\+[^\n]*\n(.*?)```"
    (text,) = re.findall(block, readme.read_text(), re.DOTALL)
    return [line for line in text.splitlines() if line.strip("+ ")]
