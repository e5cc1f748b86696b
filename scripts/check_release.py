"""Install a wheel and an sdist into empty environments, and train with each.

``python scripts/check_release.py dist [--extras base vision ...]``: for both files and for each
extra, a new virtual environment gets the package, by default with the newest versions of what it
needs, as a user gets it. It trains one epoch of digits in an empty folder. One environment exists
at a time. Needs a network, or the packages in pip's sources.
"""

import argparse
import os
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
        programs, empty = Path(folder) / "env" / "bin", Path(folder) / "empty"
        empty.mkdir()
        environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}

        def run(program: str, *arguments: str) -> str:
            command = [str(programs / program), *arguments]
            done = subprocess.run(
                command, cwd=empty, env=environment, stdout=subprocess.PIPE, text=True, check=False
            )
            if done.returncode:
                sys.exit(f"{package.name} [{extra}]: {' '.join(command)} failed\n{done.stdout}")
            return done.stdout

        wanted = f"{package}[{extra}]" if extra != "base" else str(package)
        quiet = ["--quiet", "--disable-pip-version-check", *pip_options]
        run("python", "-m", "pip", "install", *quiet, wanted)
        run("python", "-m", "pip", "check")
        if extra in IMPORTS:
            run("python", "-c", f"import {IMPORTS[extra]}")
        # flower_blsgd-0.1.0-py3-none-any.whl and flower_blsgd-0.1.0.tar.gz
        version = package.name.removesuffix(".tar.gz").split("-")[1]
        if version not in run("blsgd", "--version").split():
            sys.exit(f"{package.name}: blsgd --version does not print {version}")
        output = run("blsgd", "run", "-c", "digits", "-s", "epochs=1", "-s", "out=run")
        if not (empty / "run" / "model.safetensors").exists():
            sys.exit(f"{package.name} [{extra}]: no model\n{output}")


def main() -> None:
    """Check what the command line names."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = ["base", *tomllib.load(file)["project"]["optional-dependencies"]]
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("folder", type=Path, help="folder with one wheel and one sdist")
    line.add_argument("--extras", nargs="+", default=[e for e in extras if e != "dev"])
    line.add_argument("--torch-index", help="further index, such as that of the CPU build of torch")
    line.add_argument("--constraint", type=Path, help="versions to install, as constraints.txt")
    given = line.parse_args()
    options = ["--extra-index-url", given.torch_index] if given.torch_index else []
    options += ["-c", str(given.constraint.resolve())] if given.constraint else []
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
