"""Install a wheel and an sdist into empty environments, and train with each.

``python scripts/check_release.py dist [--extras base vision ...]``: for both files and for each
extra, a new virtual environment gets the package with the versions of constraints.txt, and trains
one epoch of digits in an empty folder. Needs a network, or the packages in pip's sources.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTS = {
    "simulation": "ray",
    "vision": "datasets, PIL",
    "text": "transformers",
    "lora": "peft",
    "lightning": "lightning_utilities",
    "tensorboard": "tensorboard",
    "docs": "sphinx, furo, myst_parser",
}
"""What each extra installs; not torchvision, whose import needs the torch of the same build."""


def check(package: Path, extra: str, pip_options: list[str]) -> None:
    """Install a file with an extra into an empty environment, and train; raise if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "env", with_pip=True)
        python = str(Path(folder) / "env" / "bin" / "python")
        wanted = f"{package}[{extra}]" if extra != "base" else str(package)
        quiet = ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([python, "-m", "pip", "install", *quiet, *pip_options, wanted], check=True)
        empty = Path(folder) / "empty"
        empty.mkdir()
        run = [
            python,
            "-m",
            "flower_blsgd",
            "run",
            "-c",
            "digits",
            "-s",
            "epochs=1",
            "-s",
            "out=run",
        ]
        output = subprocess.run(run, cwd=empty, check=True, capture_output=True, text=True).stdout
        assert (empty / "run" / "model.safetensors").exists(), output
        if extra in IMPORTS:
            subprocess.run([python, "-c", f"import {IMPORTS[extra]}"], cwd=empty, check=True)


def main() -> None:
    """Check what the command line names."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = ["base", *tomllib.load(file)["project"]["optional-dependencies"]]
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("folder", type=Path, help="folder with one wheel and one sdist")
    line.add_argument("--extras", nargs="+", default=[e for e in extras if e != "dev"])
    line.add_argument("--torch-index", help="further index, such as that of the CPU build of torch")
    given = line.parse_args()
    options = ["--extra-index-url", given.torch_index] if given.torch_index else []
    packages = [*given.folder.glob("*.whl"), *given.folder.glob("*.tar.gz")]
    if len(packages) != 2:
        sys.exit(f"{given.folder} has {len(packages)} packages, not a wheel and an sdist")
    for package in packages:
        for extra in given.extras:
            began = time.monotonic()
            check(package.resolve(), extra, options)
            seconds = time.monotonic() - began
            sys.stdout.write(f"{package.name} [{extra}]: ok, {seconds:.0f} s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
