"""Our app over a slow link: 50 ms delay and 100 Mbit/s between the nodes and the server."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.flower_engine import free_port

from ..runtime.stream.slow_link import SlowLink

pytestmark = [pytest.mark.engines, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
DELAY_SECONDS = 0.05


def linked_app(folder: Path, link_port: int) -> Path:
    """Return a copy of our app whose nodes connect through the link."""
    for name in ("clients", "server", "configs"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    server = (ROOT / "tests" / "engines" / "linked_server.py").read_text()
    (folder / "server" / "linked_server.py").write_text(
        server.replace("LINK_PORT = 0", f"LINK_PORT = {link_port}")
    )
    project = (ROOT / "pyproject.toml").read_text()
    project = project.replace("server.blsgd_server:app", "server.linked_server:app")
    project = project.replace('    "flower_blsgd/**/*.py",\n', "")
    (folder / "pyproject.toml").write_text(project)
    return folder


def test_run_over_a_slow_link_tells_transfer_apart_from_waiting(tmp_path: Path) -> None:
    out, port = tmp_path / "run", free_port()
    with SlowLink(port, DELAY_SECONDS, bytes_per_second=12_500_000) as link:
        app = linked_app(tmp_path / "app", link.port)
        settings = (
            f"epochs=1 local-steps-fast=22 local-steps-slow=7 batch-size=16 threads=1 out='{out}' "
            f"evaluate-on='server' transport='stream' stream-address='127.0.0.1:{port}'"
        )
        nodes = ["device='cpu' tier='fast'", "device='cpu' tier='slow' slowdown=3.0"]
        node_arguments = [part for node in nodes for part in ("--node", node)]
        done = subprocess.run(
            [
                *[sys.executable, "scripts/flower_engine.py", "deployment", "--app", app],
                *[*node_arguments, "-c", settings],
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert link.connections == 2, "the nodes went another way"
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert len(rounds) == 3
    for one_round in rounds:
        fast, slow = one_round["workers"]
        assert not fast["failure"]
        assert not slow["failure"]
        for worker in (fast, slow):
            # There and back, and the bytes; and no minutes that belong to somebody's computing.
            there_and_back = 2 * DELAY_SECONDS
            assert there_and_back <= worker["transfer_seconds"] < there_and_back + 10
        assert min(fast["waiting_seconds"], slow["waiting_seconds"]) == 0
        parts = ("compute_seconds", "waiting_seconds", "transfer_seconds")
        for worker in (fast, slow):
            total = sum(worker[part] for part in parts)
            assert total <= one_round["round_seconds"] + 1e-6
