"""Device of the checks and their results, one JSON line each, written at once."""

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CARD = "cpu" if os.environ.get("DEVICE") == "cpu" else "cuda:0"
"""The device under test."""

ON_CARD = CARD != "cpu"
IS_DRY_RUN = not ON_CARD or os.environ.get("FAKE_CUDA") == "1"
"""Whether sizes are tiny, and figures mean nothing: on a CPU, or an emulated card."""

ROOT = Path(__file__).parents[2]
CARRIED = ROOT / ".gpu"
"""Folder that `prepare` fills: wheels and images."""

OUT = Path(os.environ.get("OUT", CARRIED / "out"))
FILE = "checks.jsonl"
_LONGEST = 1500


class Lines:
    """Results of one check.

    Parameters
    ----------
    check : str
        Name of the check.
    """

    def __init__(self, check: str) -> None:
        self._check = check
        self.failed: list[str] = []
        """Names of the expectations that were not met."""

    def fact(self, name: str, **found: Any) -> None:
        """Write what was found."""
        OUT.mkdir(parents=True, exist_ok=True)
        with (OUT / FILE).open("a") as file:
            file.write(
                json.dumps({"check": self._check, "name": name, **found}, default=str) + "\n"
            )

    def expect(self, name: str, ok: bool, **found: Any) -> None:
        """Write what was found, and whether it is right."""
        if not ok:
            self.failed.append(name)
        self.fact(name, ok=ok, **found)

    def rows(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows of `benchmarks.rows`."""
        for one in rows:
            self.fact(**one)


def finished(*command: str) -> tuple[int, str]:
    """Run a command in the project's root; return its exit code and output.

    The code is 127 if the command is not installed.
    """
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except FileNotFoundError:
        return 127, ""
    return done.returncode, done.stdout.strip()


def tail(*outputs: str) -> str:
    """Return the ends of outputs."""
    return "\n".join(text.strip()[-_LONGEST:] for text in outputs if text.strip())
