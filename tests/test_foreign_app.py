"""An ordinary Flower app, unchanged, on the local grid: to the bit what it is without."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flower_blsgd.flower.app_folder import read_app

from .command import Command
from .examples.commands import two_nodes

APP = Path(__file__).with_name("foreign_app")


@pytest.fixture
def app_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the app leaves in sys.path and sys.modules is taken away."""
    monkeypatch.setattr(sys, "path", [str(APP), *sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "plain_app":
            del sys.modules[name]


def on_in_process_grid(result: Path, strategy: str) -> None:
    """Run it in this process: every message passes through Flower's own wire format."""
    client_app = importlib.import_module("plain_app.client_app").app
    server_app = importlib.import_module("plain_app.server_app").app
    config = {**read_app(APP).config, "strategy": strategy, "result": str(result)}
    grid = two_nodes(lambda: client_app, config)
    server_app(grid, Context(1, 1, {}, RecordDict(), config))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
def test_an_ordinary_app_gives_the_same_bits(
    app_path: None, tmp_path: Path, blsgd: Command
) -> None:
    strategy = "FedAdam"  # a FedAvg with a step of its own
    here, there = tmp_path / "here.npz", tmp_path / "there.npz"
    on_in_process_grid(here, strategy)
    settings = ["-s", f"strategy={strategy}", "-s", f"result={there}"]
    output = blsgd("run", str(APP), "--workers", "2x cpu", *settings)
    assert "running plain-app" in output
    with np.load(here) as expected, np.load(there) as found:
        assert found.files == expected.files
        for name in expected.files:
            assert found[name].dtype == expected[name].dtype
            assert found[name].tobytes() == expected[name].tobytes(), name
    expected_metrics, metrics = (
        json.loads(file.with_suffix(".json").read_text()) for file in (here, there)
    )
    assert metrics == expected_metrics
    assert list(metrics["train"]) == list(metrics["evaluate"]) == ["1", "2", "3"]
    # Two messages a round: train and evaluate; the state counts both.
    assert [m["calls"] for m in metrics["train"].values()] == [1, 3, 5]
    assert [m["calls"] for m in metrics["evaluate"].values()] == [2, 4, 6]
    assert [m["round"] for m in metrics["train"].values()] == [1, 2, 3]
    losses = [m["loss"] for m in metrics["train"].values()]
    assert losses[-1] < losses[0]
