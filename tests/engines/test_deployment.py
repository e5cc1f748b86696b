"""Flower's deployment: one SuperLink, and SuperNodes that come, go and are killed.

The nodes reach the stream's server over a slow link. The order counts: for 47 s Flower takes a
killed node for there, so that test comes last. It has the nodes of the one before.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_blsgd.engines.stream.client import serve_stream
from flower_blsgd.engines.stream.request import StreamResult
from scripts.flower_engine import free_port, session_members

from ..examples.commands import ROOT
from ..grids.processes import is_alive, wait_until
from ..grids.stream.slow_link import SlowLink
from ..session import script
from .engine import DIGITS, FIRST, LAST, Deployment, Weights, assert_bit_equal, weights

pytestmark = pytest.mark.engines

PATIENCE_SECONDS = 150.0
LOOP_APP = Path(__file__).with_name("loop_app")
# The slow node is started first: the order of connecting must not matter.
SLOW = f"device='cpu:{LAST}' tier='slow' partition-id=1 num-partitions=2"
FAST = f"device='cpu:{FIRST}' tier='fast' partition-id=0 num-partitions=2"
WALLED = f"{SLOW} name='walled'"
BOX = f"devices='1x cpu:{FIRST} fast; 1x cpu:{LAST} slow' name='box'"


LINKED_CLIENT = f"""
from clients import blsgd_client
from flower_blsgd.engines.stream import client, request

app = blsgd_client.app
serve = client.{serve_stream.__name__}

def serve_without_wall(app, message, context):
    if context.node_config.get("name") == "walled":
        return request.{StreamResult.__name__}(False, "behind a wall").to_reply(message)
    return serve(app, message, context)

client.{serve_stream.__name__} = serve_without_wall
"""
STREAM_PORT = free_port()
STREAM = f"transport='stream' stream-address='127.0.0.1:{STREAM_PORT}'"
DELAY_SECONDS, BYTES_PER_SECOND = 0.05, 12_500_000  # 100 Mbit/s


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    engine = Deployment(tmp_path_factory.mktemp("flwr-home"))
    try:
        engine.start_superlink(simulation=False)
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def link() -> Iterator[SlowLink]:
    with SlowLink(STREAM_PORT, DELAY_SECONDS, BYTES_PER_SECOND) as link:
        yield link


@pytest.fixture(scope="module")
def app(link: SlowLink, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of our app, without the library, whose nodes connect to the link.

    A router that passes a port on does the same; on one machine both cannot listen on one port.
    """
    folder = tmp_path_factory.mktemp("apps") / "app"
    for name in ("clients", "server", "configs"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "server" / "linked_server.py").write_text(
        "from flower_blsgd import StreamGrid\n"
        "from server import blsgd_server\n"
        f"StreamGrid._addresses = lambda self, address: ['127.0.0.1:{link.port}']\n"
        "app = blsgd_server.app\n"
    )
    (folder / "clients" / "linked_client.py").write_text(LINKED_CLIENT)
    project = (ROOT / "pyproject.toml").read_text()
    project = project.replace("server.blsgd_server:app", "server.linked_server:app")
    project = project.replace("clients.blsgd_client:app", "clients.linked_client:app")
    project = project.replace('    "flower_blsgd/**/*.py",\n', "")
    (folder / "pyproject.toml").write_text(project)
    return folder


@pytest.mark.full
def test_two_devices_behind_one_supernode_train_as_on_the_local_grid(
    deployment: Deployment, app: Path, tmp_path: Path, local_weights: Weights
) -> None:
    """Equal up to the rounding of the average on their machine, over two rounds."""
    deployment.use_nodes(BOX)
    log = deployment.run(app, f"{DIGITS} {STREAM} min-workers=1 out='{tmp_path / 'run'}'")
    assert "box/0" in log
    found = weights(tmp_path / "run")
    assert found.keys() == local_weights.keys()
    for name, tensor in found.items():
        assert np.abs(tensor - local_weights[name]).max() < 1e-5, name


def test_scripts_on_two_nodes_train_and_start_again(
    deployment: Deployment, app: Path, tmp_path: Path
) -> None:
    """The script of the slow node raises an exception, once; each has its own arguments."""
    slow, fast = (f"script='{script.__file__} raise {n} {tmp_path}'" for n in (0, 1))
    deployment.use_nodes(f"{SLOW} steps=2 batch=4 {slow}", f"{FAST} steps=5 {fast}")
    out, text = tmp_path / "run", "threads=1 local-steps-fast=5 batch-size=8 rounds=60"
    log = deployment.run(app, f"task='script.py' epochs=1000 {text} {STREAM} out='{out}'")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rounds"] == 60, log
    failures = {(failure["worker"], failure["kind"]) for failure in summary["failures"]}
    assert (f"slow-1 (cpu:{LAST})", "raised") in failures
    assert summary["samples"] > 60 * 40  # both took part


def test_a_node_on_a_slow_link_and_one_without_a_stream_give_the_same_bits(
    deployment: Deployment, app: Path, link: SlowLink, tmp_path: Path, local_weights: Weights
) -> None:
    """The slow one gets plain messages: each is a new process, and its momentum survives."""
    deployment.use_nodes(WALLED, FAST)
    out, before = tmp_path / "run", link.connections
    log = deployment.run(app, f"{DIGITS} {STREAM} evaluate-on='server' out='{out}'")
    assert (out / "summary.json").exists(), log
    assert "behind a wall" in log
    assert link.connections == before + 1, "the other node went another way"
    assert_bit_equal(local_weights, weights(out))
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    for one_round in rounds:
        workers = one_round["workers"]
        assert min(worker["waiting_seconds"] for worker in workers) == 0
        # There and back.
        assert workers[0]["transfer_seconds"] >= 2 * DELAY_SECONDS
        for worker in workers:
            assert not worker["failure"]
            parts = ("compute_seconds", "waiting_seconds", "transfer_seconds")
            total = sum(worker[part] for part in parts)
            assert total <= one_round["round_seconds"] + 1e-6


class LoopRun:
    """A run of the loop app, and what its ServerApp notes."""

    def __init__(self, deployment: Deployment, notes: Path) -> None:
        self._deployment, self._notes = deployment, notes
        arguments = ["-c", f"notes='{notes}'", "--format", "json"]
        self.run_id = str(
            json.loads(deployment.output_of("run", LOOP_APP, "engine", *arguments))["run-id"]
        )

    def rounds(self) -> list[dict[str, Any]]:
        file = self._notes / "rounds.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]  # the last may be half written

    def wait_for(self, condition: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Wait for a new round whose processes, by the node's partition, are such; return them."""
        since = len(self.rounds())

        def found() -> list[dict[str, int]]:
            processes = [line["processes"] for line in self.rounds()[since:]]
            return [each for each in processes if condition(each)]

        if not wait_until(found, PATIENCE_SECONDS):
            log = self._deployment.output_of("log", self.run_id, "engine", "--show")
            raise AssertionError(f"{self.rounds()[-3:]}\n{log}")
        return found()[0]


def client_apps(deployment: Deployment) -> list[int]:
    """Return the processes of ClientApps that live now."""
    members = [pid for process in deployment.processes for pid in session_members(process.pid)]
    found = []
    for pid in members:
        try:
            if b"flwr-clientapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue  # it has ended
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="this system has no /proc")
def test_supernode_that_is_killed_comes_back_and_a_stopped_run_frees_all(
    deployment: Deployment, tmp_path: Path
) -> None:
    """It is killed alone: what it started would live on, and hold the device."""
    deployment.use_nodes(WALLED, FAST)
    run = LoopRun(deployment, tmp_path)
    first = run.wait_for(lambda found: found.keys() == {"0", "1"})

    killed = deployment._nodes.pop(WALLED)
    killed.kill()
    killed.wait()
    assert wait_until(lambda: not is_alive(first["1"]))
    run.wait_for(lambda found: found.keys() == {"0"})
    deployment.use_nodes(WALLED, FAST)
    second = run.wait_for(lambda found: found.keys() == {"0", "1"})
    assert second["0"] == first["0"]
    assert second["1"] != first["1"]

    # Each ClientApp locks its device, and fails if another process has it.
    errors = [error for line in run.rounds() for error in line["errors"]]
    assert not [error for error in errors if "BlockingIOError" in error]

    deployment.output_of("stop", run.run_id, "engine")
    assert wait_until(lambda: not client_apps(deployment), PATIENCE_SECONDS)
