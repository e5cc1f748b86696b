"""``blsgd supernode`` with a fake flower-supernode beside its Python, started as a user would."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.grids.processes import living, wait_until

ROOT = Path(__file__).parents[2]
MARKER = "BLSGD_SUPERNODE_TEST"

_FAKE = Path(__file__).with_name("fake_supernode.py")
_START = """
import sys
sys.executable = sys.argv.pop(1)
from flower_blsgd.cli.main import main
sys.exit(main())
"""


class Command:
    """A started command."""

    def __init__(self, folder: Path, port: int, *arguments: str) -> None:
        self.marker, self.folder = uuid.uuid4().hex, folder
        self.errors = (folder / "errors").open("w+")
        self.output = (folder / "output").open("w+")
        python = _fake_environment(folder / "bin")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", _START, python, "supernode", "--insecure"),
                *("--superlink", f"127.0.0.1:{port}", *arguments),
            ],
            cwd=folder,
            env={
                **{k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")},
                "PYTHONPATH": str(ROOT),
                "FAKE_FOLDER": str(folder),
                MARKER: self.marker,
            },
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.errors,
            start_new_session=True,
        )

    def notes(self) -> list[dict[str, Any]]:
        """Return what each SuperNode that runs was given, in the order of their names."""
        notes = [json.loads(path.read_text()) for path in self.folder.glob("*.json")]
        return sorted(notes, key=lambda note: str(note["name"]))

    def wait_for_nodes(self, count: int) -> list[dict[str, Any]]:
        assert wait_until(lambda: len(self.notes()) == count), self.printed()
        return self.notes()

    def printed(self) -> tuple[str, str]:
        """Return stdout and stderr so far."""
        return (self.folder / "output").read_text(), (self.folder / "errors").read_text()

    def living(self) -> list[int]:
        """Return the living processes that inherited the command's environment."""
        return living(f"{MARKER}={self.marker}")


@contextlib.contextmanager
def command(folder: Path, port: int, *arguments: str) -> Iterator[Command]:
    """Start the command; whatever is left in the end is killed."""
    started = Command(folder, port, *arguments)
    try:
        yield started
    finally:
        for pid in started.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        started.process.wait()
        started.errors.close()
        started.output.close()


def _fake_environment(folder: Path) -> Path:
    """Return a Python with the fake program beside it."""
    folder.mkdir()
    python = folder / "python"
    python.symlink_to(Path(sys.executable).resolve())
    program = folder / "flower-supernode"
    shutil.copy(_FAKE, program)
    program.write_text(f"#!{sys.executable}\n{program.read_text()}")
    program.chmod(0o755)
    return python
