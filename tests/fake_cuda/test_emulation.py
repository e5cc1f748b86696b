"""All tests marked cuda, in one process with two emulated cards."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .environment import emulated

TESTS = Path(__file__).parents[1]


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_tests_that_need_cuda_pass_on_it() -> None:
    environment = {**emulated(memory="1e9"), "OMP_NUM_THREADS": "1"}
    files = [f for f in sorted(TESTS.rglob("test_*.py")) if "mark.cuda" in f.read_text()]
    options = ["-qrs", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "-m", "cuda"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b\d\d+ passed\b", done.stdout), done.stdout
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("compile" in line for line in skipped), skipped
