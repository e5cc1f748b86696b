"""Other interpreters of this machine, in which workers run: their versions and accelerators.

``python -m flower_blsgd.devices.interpreter`` prints those of the one that runs it.
"""

import functools
import json
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from ..errors import UsageError
from .machine import Machine, this_machine

_PACKAGES = ("flower-blsgd", "flwr", "torch", "numpy")
_LONGEST_SECONDS = 120.0


@dataclass(frozen=True)
class Interpreter:
    """Versions by package in an interpreter, and for each accelerator why it is unusable.

    The reason is empty if torch can compute on it.
    """

    versions: Mapping[str, str]
    accelerators: Mapping[str, str]

    def refusal(self, device: str) -> str:
        """Return why a worker cannot have this device there; empty if it can."""
        if device == "cpu":
            return ""
        if not Machine((), tuple(self.accelerators)).has_accelerator(device):
            have = ", ".join(["cpu", *self.accelerators])
            return f"device {device} is not available; it has {have}"
        return self.accelerators.get(device, "")


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a bundle, not from an installed package
            found[package] = "not installed"
    return found


def _versions() -> dict[str, str]:
    return {"Python": platform.python_version(), **installed(_PACKAGES)}


@functools.cache
def interpreter(python: str) -> Interpreter:
    """Return what another interpreter has; the first call takes seconds.

    UsageError if it cannot be used: messages are pickles of Flower's classes and ours.
    """
    ours = _versions()
    try:
        done = subprocess.run(
            [python, "-P", "-m", __name__],
            capture_output=True,
            text=True,
            timeout=_LONGEST_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"workers: python={python} cannot be started ({error}); give the interpreter of an "
            "environment, such as ~/venv/bin/python"
        ) from None
    try:
        found = Interpreter(**json.loads((done.stdout.splitlines() or [""])[-1]))
    except (TypeError, ValueError):
        reason = (done.stderr.strip().splitlines() or ["it is no Python"])[-1]
        raise UsageError(
            f"workers: python={python}: {reason}; it must be Python 3.11 or newer, with "
            f"flower-blsgd {ours['flower-blsgd']}"
        ) from None
    for package, numbers in (("flower-blsgd", None), ("flwr", 2)):
        if found.versions[package].split(".")[:numbers] != ours[package].split(".")[:numbers]:
            raise UsageError(
                f"workers: python={python} has {package} {found.versions[package]}, and this one "
                f"{ours[package]}; install the same version in both"
            )
    return found


def differences(python: str) -> str:
    """Return a line on versions that may differ, and do; empty if none does."""
    its = interpreter(python).versions
    ours = _versions()
    found = [f"{name} {its[name]} (here {ours[name]})" for name in ours if its[name] != ours[name]]
    return f"{python} has {', '.join(found)}; models may differ in rounding" if found else ""


if __name__ == "__main__":
    machine = this_machine()
    problems = {device: machine.problem(device) for device in machine.accelerators}
    print(json.dumps({"versions": _versions(), "accelerators": problems}))  # noqa: T201
