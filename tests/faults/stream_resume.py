"""Kill the ServerApp and a SuperNode of a stream's run at random moments, and resume the run.

Each time a run of digits begins on a SuperLink with two SuperNodes. Both are killed with SIGKILL,
the SuperNode with all that it started; it is started again, and the run is resumed.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ..engines.engine import FIRST, LAST, Deployment
from ..examples.commands import ROOT
from ..grids.processes import wait_until

SETTINGS = (
    "transport='stream' epochs=30 local-steps-fast=8 local-steps-slow=4 batch-size=16 threads=1 "
    "checkpoint-minutes=0.001 workers='auto'"
)
NODES = [
    f"device='cpu:{FIRST}' tier='fast' partition-id=0 num-partitions=2",
    f"device='cpu:{LAST}' tier='slow' partition-id=1 num-partitions=2",
]
PATIENCE_SECONDS = 240.0


def kill_and_resume(deployment: Deployment, out: Path, draws: random.Random) -> str:
    """Do it once; return what happened."""
    victim = draws.choice(NODES)
    deployment.use_nodes(*NODES)
    begin(deployment, f"{SETTINGS} seed={draws.randrange(100)} out='{out}'")
    goal = draws.randint(2, 150)
    wait_for(lambda: rounds(out) >= goal and checkpoints(out), out, deployment)
    before = rounds(out)
    server_first = draws.random() < 0.5
    if server_first:
        kill_server(deployment)
    else:
        deployment.kill(deployment._nodes.pop(victim))
    pause = draws.uniform(0, 2)
    time.sleep(pause)
    if server_first:
        deployment.kill(deployment._nodes.pop(victim))
    else:
        kill_server(deployment)
    killed, at_kill = time.monotonic(), rounds(out)
    assert not (out / "summary.json").exists(), "it was over before"
    deployment.use_nodes(*NODES)
    config = (out / "config.toml").read_text()
    seed = next(line for line in config.splitlines() if line.startswith("seed"))
    begin(deployment, f"{SETTINGS} {seed.replace(' ', '')} out='{out}' resume='{out}'")
    wait_for(lambda: rounds(out) > at_kill, out, deployment)
    again = time.monotonic() - killed
    wait_for((out / "summary.json").exists, out, deployment)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["epochs"] == 30, summary
    first, second = ("ServerApp", "SuperNode") if server_first else ("SuperNode", "ServerApp")
    return (
        f"{first} after round {before}, {second} {pause:.1f} s later after round {at_kill}, "
        f"trained again after {again:.0f} s, {summary['rounds']} rounds, "
        f"accuracy {summary['accuracy']:.4f}"
    )


def begin(deployment: Deployment, settings: str) -> None:
    deployment.output_of("run", ROOT, "engine", "-c", settings)


def kill_server(deployment: Deployment) -> None:
    """Kill the ServerApps of this deployment: Flower starts each in a session of its own."""
    home = str(deployment.home).encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_server = b"flwr-serverapp" in (process / "cmdline").read_bytes()
            if is_server and home in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def rounds(out: Path) -> int:
    file = out / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def checkpoints(out: Path) -> bool:
    return any((out / "checkpoint").glob("round-*"))


def wait_for(condition: Callable[[], object], out: Path, deployment: Deployment) -> None:
    if not wait_until(condition, PATIENCE_SECONDS):
        logs = deployment.output_of("ls", "engine")
        raise AssertionError(f"{out.name} did not go on: {rounds(out)} rounds\n{logs}")
