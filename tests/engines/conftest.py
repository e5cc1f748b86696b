"""The wheel, and the run from it that the tests of all engines compare with."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from ..examples.commands import ROOT, run
from .engine import DIGITS, Weights, weights


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of one `make test` share."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    (folder / "engines").mkdir(exist_ok=True)
    return folder / "engines"


@pytest.fixture(scope="session")
def wheel(shared: Path) -> Path:
    with FileLock(shared / "wheel.lock"):
        if not list(shared.glob("*.whl")):
            build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
            command = [*build, "--outdir", str(shared)]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = shared.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def local_weights(wheel: Path, shared: Path) -> Weights:
    """The weights of the local grid, which the installed wheel trains in an empty folder."""
    site, empty = shared / "site", shared / "empty"
    with FileLock(shared / "run.lock"):
        if not (empty / "run" / "summary.json").exists():
            zipfile.ZipFile(wheel).extractall(site)
            empty.mkdir(exist_ok=True)
            command = ("-m", "flower_blsgd", "run", "-c", f"{DIGITS} out='run'")
            output = run(*command, cwd=empty, path=site)
            assert "from the built-in app" in output.splitlines()[0]
    return weights(empty / "run")
