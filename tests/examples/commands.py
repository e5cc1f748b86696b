"""How the tests start the examples: as a user does, in processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

_ACCURACY = re.compile(r"^(.+?):? +test accuracy ([\d.]+)%", re.MULTILINE)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run Python with these arguments, which must end well; return all that was told."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def accuracies(told: str) -> dict[str, float]:
    """Return the test accuracies in percent that an example printed, by what stands before."""
    return {name.strip(): float(percent) for name, percent in _ACCURACY.findall(told)}
