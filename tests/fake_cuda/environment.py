"""Environment of processes that see emulated cards, and the library that they load."""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_SOURCES = _HERE / "native"
_SITE = _HERE / "site"

_SETTINGS = frozenset(
    ["devices", "memory", "kernel_us", "names", "caps", "uuids", "archs", "fail_at", "log"]
)
_FLAGS = "-O1", "-std=c++20", "-fPIC", "-shared", "-w"


def is_emulated() -> bool:
    """Return whether this process sees emulated cards."""
    return os.environ.get("FAKE_CUDA") == "1"


def emulated(**settings: str) -> dict[str, str]:
    """Return the environment of a process with emulated cards, which sees all of them.

    `settings` are those of the package's docstring in lower case, as in ``kernel_us="300,1200"``.
    The first process that needs the library builds it. The test is skipped where that is
    impossible.
    """
    if unknown := settings.keys() - _SETTINGS:
        raise TypeError(f"no settings of the emulation: {sorted(unknown)}")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("FAKE_CUDA") and name != "CUDA_VISIBLE_DEVICES"
    }
    paths = [str(_SITE), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **inherited,
        **{f"FAKE_CUDA_{name.upper()}": value for name, value in settings.items()},
        "FAKE_CUDA": "1",
        "FAKE_CUDA_LIB": str(library()),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def library() -> Path:
    """Return the library for this torch; build it in the virtual environment if it is missing."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    if not (torch / "lib" / "libtorch_cpu.so").exists() or list(torch.glob("lib/libtorch_cuda*")):
        pytest.skip("the emulation of CUDA needs a CPU build of torch on Linux")
    files = sorted(_SOURCES.iterdir())
    digest = hashlib.sha256(b"\0".join([*map(Path.read_bytes, files), repr(_FLAGS).encode()]))
    version = importlib.metadata.version("torch")
    built = Path(sys.prefix, "fake-cuda", f"{version}-{digest.hexdigest()[:16]}.so")
    if built.exists():
        return built
    if shutil.which("g++") is None:
        pytest.skip("the emulation of CUDA needs g++")
    built.parent.mkdir(exist_ok=True)
    with FileLock(built.with_suffix(".lock")):  # other processes wait for this build
        if not built.exists():
            _build(torch, built)
    return built


def _build(torch: Path, target: Path) -> None:
    unfinished = target.with_suffix(".part")
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    links = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch"]
    source = str(_SOURCES / "fake_cuda.cpp")
    command = ["g++", *_FLAGS, *includes, source, "-o", str(unfinished), *links]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    unfinished.replace(target)


if __name__ == "__main__":  # prints what to set in a shell
    for _name in ("FAKE_CUDA", "FAKE_CUDA_LIB", "PYTHONPATH"):
        print(f"export {_name}={emulated()[_name]}")
