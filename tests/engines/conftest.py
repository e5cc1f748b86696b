"""The wheel, and the run from it that the tests of all engines compare with."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ..examples.commands import ROOT, run
from .engine import DIGITS, Weights, weights


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def local_weights(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The weights of the local grid, which the installed wheel trains in an empty folder."""
    site, empty = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("empty")
    zipfile.ZipFile(wheel).extractall(site)
    output = run("-m", "flower_blsgd", "run", "-c", f"{DIGITS} out='run'", cwd=empty, path=site)
    assert "from the built-in app" in output.splitlines()[0]
    return weights(empty / "run")
