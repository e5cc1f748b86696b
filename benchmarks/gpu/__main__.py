"""Run the checks of one call, or a single check.

``python3 -m benchmarks.gpu works`` (at most 330 s), ``... speed`` (at most 300 s), or the name of
a check. Each check is a process with its own limit; a failure does not stop the others. Results go
to ``$OUT/checks.jsonl`` line by line, all output to ``$OUT/log``, and the clocks of the card to
``$OUT/clocks.csv``. ``DEVICE=cpu`` is a dry run; ``PATIENCE=4`` multiplies all limits, for a slow
machine. Packages that are missing are installed from ``.gpu/wheels``; see `prepare`.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .lines import CARRIED, FILE, IS_DRY_RUN, OUT, ROOT, Lines

PATIENCE = float(os.environ.get("PATIENCE", "1"))
SETUP_SECONDS = 30
KILL_SECONDS = 2
"""Time to clean up after the limit."""
_IMPORTS = "import flwr.clientapp, grpc_health.v1.health_pb2_grpc, flower_blsgd.cli.main"
_ONLY_IF_OLD = "protobuf-", "grpcio-1"
"""Wheels that are installed only if the machine's own versions do not fit."""


@dataclass(frozen=True)
class Check:
    """A function of a module here, and the seconds that it may take."""

    module: str
    name: str
    seconds: int


CALLS = {
    "works": (
        Check("card", "card", 15),
        Check("card", "fork", 15),
        Check("card", "tests", 60),
        Check("orders", "waits", 25),
        Check("orders", "memory", 20),
        Check("orders", "copies", 35),
        Check("programs", "run", 60),
        Check("programs", "launch", 45),
    ),
    "speed": (
        Check("card", "card", 15),
        Check("speed", "steps", 65),
        Check("speed", "compiled", 55),
        Check("programs", "together", 40),
        Check("programs", "gain", 40),
        Check("speed", "compiled_tests", 40),
    ),
}
"""Checks by call, the most important first."""

LIMITS = {"works": 330, "speed": 300}
"""Seconds of a whole call."""


def main(words: list[str]) -> int:
    """Run a call, or in a process of its own, a check."""
    checks = {check.name: check for call in CALLS.values() for check in call}
    if len(words) == 1 and words[0] in CALLS:
        return run_call(words[0])
    if len(words) == 1 and words[0] in checks:
        return run_check(checks[words[0]])
    print(f"{__doc__}\ncalls and checks: {', '.join([*CALLS, *checks])}", file=sys.stderr)
    return 2


def run_check(check: Check) -> int:
    """Run a check in this process; return 1 if it found a fault."""
    lines, lines_before = Lines(check.name), len(_lines())
    try:
        getattr(importlib.import_module(f"{__package__}.{check.module}"), check.name)(lines)
    finally:
        for line in _lines()[lines_before:]:
            print("    ", _short(line), flush=True)
    if lines.failed:
        print("not as expected:", "; ".join(lines.failed), flush=True)
    return int(bool(lines.failed))


def run_call(name: str) -> int:
    """Run the checks of a call, each in a process; return 1 if one failed or had no time."""
    ends_at = time.monotonic() + LIMITS[name] * PATIENCE
    OUT.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="blsgd-") as folder, _clocks() as clocks:
        environment = _environment(Path(folder))
        _install(environment)
        for check in CALLS[name]:
            began, lines_before = time.monotonic(), len(_lines())
            seconds = min(check.seconds * PATIENCE, ends_at - began - KILL_SECONDS)
            outcome = outcome_of(
                [sys.executable, "-m", __package__, check.name], seconds, environment
            )
            took = time.monotonic() - began
            failed |= bool(outcome)
            Lines("call").fact(
                check.name, ok=not outcome, seconds=round(took, 1), outcome=outcome, **clocks()
            )
            print(f"{'FAIL' if outcome else 'ok':4s} {check.name} ({took:.0f} s) {outcome}")
            for line in _lines()[lines_before:-1]:
                print("    ", _short(line), flush=True)
    return int(failed)


def outcome_of(command: list[str], seconds: float, environment: dict[str, str]) -> str:
    """Run a command in a process group of its own; return why it failed, or nothing.

    After `seconds`, all processes of the group are interrupted, then killed.
    """
    if seconds < KILL_SECONDS:
        return "not run: no time was left"
    with (OUT / "log").open("a") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        code = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGINT)
                process.wait(KILL_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code is None:
        return f"took longer than {seconds:.0f} s"
    return "" if code == 0 else (OUT / "log").read_text().strip().rpartition("\n")[2][:300]


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of the checks; `folder` is removed at the end of the call."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", ""), str(_site())]
    return {
        **os.environ,
        "OUT": str(OUT.resolve()),
        "TMPDIR": str(folder),
        "BLSGD_CACHE": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


def _site() -> Path:
    return Path(tempfile.gettempdir()) / "blsgd-site"


def _install(environment: dict[str, str]) -> None:
    """Install the wheels unless everything can be imported."""
    test = [sys.executable, "-c", _IMPORTS]
    wheels = sorted((CARRIED / "wheels").glob("*.whl"))
    last = [wheel for wheel in wheels if wheel.name.startswith(_ONLY_IF_OLD)]
    for some in ([wheel for wheel in wheels if wheel not in last], last):
        if not some or not outcome_of(test, SETUP_SECONDS * PATIENCE, environment):
            return
        flags = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
        pip = [sys.executable, "-m", "pip", "-q", "install", *flags, "--target", str(_site())]
        if reason := outcome_of([*pip, *map(str, some)], SETUP_SECONDS * PATIENCE, environment):
            print("FAIL pip install:", reason, flush=True)


@contextlib.contextmanager
def _clocks() -> Iterator[Any]:
    """Record the card's clocks once a second; yield a function: their range since its last call."""
    path, seen = OUT / "clocks.csv", 0
    query = "timestamp,clocks.sm,clocks.mem,utilization.gpu,temperature.gpu,power.draw,memory.used"
    command = ["nvidia-smi", "-l", "1", "--format=csv,noheader,nounits", f"--query-gpu={query}"]

    def clocks() -> dict[str, Any]:
        nonlocal seen
        rows = path.read_text().splitlines() if path.exists() else []
        found = (row.split(",")[1].strip() for row in rows[seen:] if row.count(",") == 6)
        sm = [int(clock) for clock in found if clock.isdigit()]  # a card may not say it
        seen = len(rows)
        return {"sm_clock_mhz": [min(sm), max(sm)]} if sm else {}

    watcher = None
    with contextlib.suppress(FileNotFoundError), path.open("a") as file:
        watcher = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
    try:
        yield clocks
    finally:
        if watcher is not None:
            watcher.kill()
            watcher.wait()


def _lines() -> list[dict[str, Any]]:
    path = OUT / FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _short(line: dict[str, Any]) -> str:
    """Return a result on one line of a terminal."""
    name, value = line["name"], line.get("value")
    if value is None:
        rest = {k: v for k, v in line.items() if k not in ("check", "name", "value") and v}
        return f"{name}: {rest}"[:240]
    spread = f"{line['minimum']:.4g} to {line['maximum']:.4g}, n = {line['count']}"
    ratio = f"; {line['ratio']:.3f} x {line['against']}" if line["ratio"] else ""
    return f"{name}: {value:.4g} {line['unit']} ({spread}){ratio}"


if __name__ == "__main__":
    if IS_DRY_RUN:
        print("a dry run: no figure of it counts")
    sys.exit(main(sys.argv[1:]))
