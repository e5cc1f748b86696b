"""The same two apps on three engines: real processes, and equal weights to the bit."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]

# (22 + 7) x 16 = 464 samples a round, so an epoch of 1,437 samples has three rounds.
SETTINGS = (
    "epochs=1 local-steps-fast=22 local-steps-slow=7 batch-size=16 threads=1 seed=3 "
    "workers='1x cpu:{first} fast; 1x cpu:{last} slow'"
)


def settings(out: Path) -> str:
    first, last = cores()
    return f"{SETTINGS.format(first=first, last=last)} out='{out}'"


def cores() -> tuple[int, int]:
    from flower_blsgd.runtime.machine import usable_cores

    return usable_cores()[0], usable_cores()[-1]


def weights(out: Path) -> dict[str, np.ndarray]:
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert [worker["tier"] for worker in summary["workers"]] == ["fast", "slow"]
    assert [worker["local_steps"] for worker in summary["workers"]] == [22, 7]
    return load_file(out / "model.safetensors")


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def local_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    out = tmp_path_factory.mktemp("local") / "run"
    run("-m", "flower_blsgd", "run", ".", "-c", settings(out))
    return weights(out)


def assert_bit_equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.tobytes() == theirs[name].tobytes(), name


@pytest.mark.engines  # beside the others, which need the same first run
def test_local_grid_twice_gives_the_same_bits_and_another_seed_others(
    tmp_path: Path, local_weights: dict[str, np.ndarray]
) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    run("-m", "flower_blsgd", "run", ".", "-c", settings(again))
    run("-m", "flower_blsgd", "run", ".", "-c", settings(other), "-s", "seed=4")
    assert_bit_equal(local_weights, weights(again))
    theirs = weights(other)
    assert any(not np.array_equal(local_weights[name], theirs[name]) for name in theirs)


@pytest.mark.engines
@pytest.mark.timeout(500)
def test_simulation_gives_the_same_bits(
    tmp_path: Path, local_weights: dict[str, np.ndarray]
) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "run"
    run("scripts/flower_engine.py", "simulation", "-c", settings(out))
    assert_bit_equal(local_weights, weights(out))


@pytest.mark.engines
@pytest.mark.timeout(500)
def test_superlink_with_two_supernodes_gives_the_same_bits(
    tmp_path: Path, local_weights: dict[str, np.ndarray]
) -> None:
    """Momentum survives from message to message: here each message is a new process."""
    assert_bit_equal(local_weights, deployment_weights(tmp_path / "run", "transport='messages'"))


@pytest.mark.engines
@pytest.mark.timeout(500)
def test_stream_gives_the_same_bits(tmp_path: Path, local_weights: dict[str, np.ndarray]) -> None:
    assert_bit_equal(local_weights, deployment_weights(tmp_path / "run", "transport='stream'"))


def deployment_weights(out: Path, transport: str) -> dict[str, np.ndarray]:
    """Train with a SuperLink and two SuperNodes."""
    first, last = cores()
    # The slow node is started first: the order of connecting must not matter.
    nodes = [f"device='cpu:{last}' tier='slow'", f"device='cpu:{first}' tier='fast'"]
    node_arguments = [part for node in nodes for part in ("--node", node)]
    config = f"{settings(out)} {transport}"
    run("scripts/flower_engine.py", "deployment", *node_arguments, "-c", config)
    return weights(out)
