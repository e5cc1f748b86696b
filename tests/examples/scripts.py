"""How the tests run the scripts of examples, and count the lines that make them workers."""

import difflib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from .commands import ROOT

ALONE = """
import os, runpy, sys
from flower_blsgd.data.libraries import repair_torchvision
from flower_blsgd.session.exchange import HERE

repair_torchvision()
for folder, *words in {commands}:
    HERE.has_joined = False
    os.chdir(folder)
    print("begin", os.path.basename(folder), flush=True)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
"""


def run_alone(*commands: list[str]) -> list[str]:
    """Run scripts, each with its folder in front, one after the other; return what each printed.

    In one process, because importing their libraries takes most of the time.
    """
    output = python("-c", ALONE.format(commands=list(commands)), cwd=ROOT)
    printed = output.split("begin ")[1:]
    assert len(printed) == len(commands)
    return printed


def python(*arguments: str, cwd: Path) -> str:
    """Run Python, which must succeed; return both outputs."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
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
