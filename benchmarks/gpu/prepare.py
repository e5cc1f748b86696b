"""Fill ``.gpu`` with what a machine without a network lacks, for the calls there.

``python -m benchmarks.gpu.prepare [--python 3.12]``, on a machine with a network: wheels of this
project and of the packages that an image with PyTorch lacks, and a fifth of CIFAR-10 from
``data/cifar10``. Together with the repository they stay below 64 MiB.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from ..images import required_images
from .lines import CARRIED, ROOT

MOST_MIB = 64
IMAGES = {"train": 10_000, "test": 2_000}
GLIBC = "34", "28", "17"
PACKAGES = (
    *("flwr", "grpcio-health-checking", "cryptography", "cffi", "pycryptodome", "iterators"),
    *("tomli-w", "shtab"),
    *("protobuf", "grpcio"),  # in case those of the machine are older than flwr's generated code
)


def main(arguments: list[str] | None = None) -> int:
    """Fill the folder; return 1 if it is too large to travel."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.gpu.prepare", description=__doc__)
    line.add_argument("--python", default="3.12", help="version there (default: 3.12)")
    line.add_argument(
        "--data",
        type=Path,
        help="folder of CIFAR-10's images (default: data/cifar10 beside benchmarks/)",
    )
    chosen = line.parse_args(arguments)
    shutil.rmtree(CARRIED, ignore_errors=True)
    collect_wheels(chosen.python)
    cut_images(Path(required_images(chosen.data)))
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    files = [ROOT / name for name in tracked.split("\0") if name]
    files += CARRIED.rglob("*")
    mib = sum(file.stat().st_size for file in files if file.is_file()) / 2**20
    print(f"repository and {CARRIED.name}: {mib:.1f} MiB of {MOST_MIB}")
    return int(mib > MOST_MIB)


def collect_wheels(python: str) -> None:
    """Build this project's wheel, and download the others for Linux on x86-64."""
    folder = CARRIED / "wheels"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    building = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    target = [f"--python-version={python}", *platforms, "--platform=manylinux2014_x86_64"]
    binary = ["--no-deps", "--only-binary=:all:", "-c", "constraints.txt", "-d", str(folder)]
    subprocess.run(building, cwd=ROOT, check=True)
    subprocess.run([*pip, "download", *binary, *target, *PACKAGES], cwd=ROOT, check=True)


def cut_images(source: Path) -> None:
    """Copy the first images of each split, as they are."""
    folder = CARRIED / "cifar10"
    folder.mkdir(parents=True)
    for split, count in IMAGES.items():
        (path,) = source.glob(f"{split}-*.parquet")
        pq.write_table(pq.read_table(path).slice(0, count), folder / path.name)


if __name__ == "__main__":
    sys.exit(main())
