"""What a number depends on: versions, the machine, and what else ran on it."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flower_blsgd.devices.machine import accelerator_names, cpu_name, free_bytes, this_machine

_ROOT = Path(__file__).parents[1]
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# A benchmark loads the machine itself, so these are read when it is imported.
_STARTED_AT = datetime.now(UTC)
_LOAD_AT_START = os.getloadavg()[0]
_FREE_AT_START = free_bytes()


def conditions(**more: Any) -> dict[str, Any]:
    """Return the conditions of this process, and those that the benchmark adds."""
    import torch

    return {
        "date": _STARTED_AT.isoformat(timespec="seconds"),
        "cores": len(this_machine().cores),
        "processor": cpu_name(),
        "memory_gb": _gigabytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "free_memory_gb_at_start": _gigabytes(_FREE_AT_START),
        "load_average_at_start": round(_LOAD_AT_START, 2),
        "accelerators": list(accelerator_names(this_machine())),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "flwr": _version("flwr"),
        "torch": torch.__version__,
        **({"cuda": torch.version.cuda} if torch.cuda.is_available() else {}),
        "flower_blsgd": _version("flower-blsgd"),
        "commit": _commit(),
        "torch_threads": torch.get_num_threads(),
        **{name.lower(): os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
        **more,
    }


def _gigabytes(count: int | None) -> float | None:
    return None if count is None else round(count / 1e9, 1)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a folder without being installed
        return "not installed"


def _commit() -> str | None:
    """Return the commit of this code, with a plus if files differ from it; else of ``$COMMIT``."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(_ROOT), *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT")
    return commit + ("+" if changes else "")
