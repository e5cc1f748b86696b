"""Pretrained weights are loaded once in a run, by the server, before anything starts."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.numpy import load_file
from torch import nn

import flower_blsgd
from flower_blsgd import Task
from flower_blsgd.errors import UsageError
from flower_blsgd.protocol import TrainOrder
from flower_blsgd.runtime.machine import usable_cores
from flower_blsgd.tasks import register_task
from server.blsgd_server import app as server_app

from .test_run import config_of, grid_of

ROOT = Path(__file__).parents[1]
CORE = usable_cores()[0]
TINY = 1e-9
"""A learning rate that leaves the weights where they begin."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def task_of(pretrained: Callable[[nn.Module], None] | None) -> Task:
    """Return a task of 300 points in two classes."""
    points = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    labels = (points[:, 0] > 0).long()
    return Task(
        model=lambda: nn.Linear(4, 2),
        train=(points[:300], labels[:300]),
        test=(points[300:], labels[300:]),
        pretrained=pretrained,
        evaluation_batch_size=64,
    )


def noting(log: Path) -> Callable[[nn.Module], None]:
    """Return what loads weights, and writes down which process did."""

    def pretrained(model: nn.Module) -> None:
        with log.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        with torch.no_grad():
            model.weight.copy_(torch.arange(8.0).reshape(2, 4))
            model.bias.fill_(0.5)

    return pretrained


def test_first_round_begins_with_them(folder: Path) -> None:
    """Here servers and workers are one process, so every call counts."""
    log = folder / "calls"
    name = register_task(task_of(noting(log)), "begins-with-weights")
    settings = config_of(task=name, epochs=1, batch_size=10, local_steps_fast=4, out="run")
    grid = grid_of(settings)
    server_app(grid, Context(1, 1, {}, RecordDict(), settings.to_run_config()))
    assert log.read_text() == f"{os.getpid()}\n"
    orders = [message for message in grid.sent if message.metadata.message_type == "train"]
    first = TrainOrder.from_message(orders[0])
    assert first.round == 1
    assert first.arrays["weight"].numpy().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert first.arrays["bias"].numpy().tolist() == [0.5, 0.5]


def test_weights_that_cannot_be_had_are_refused_before_anything_starts(folder: Path) -> None:
    def gone(model: nn.Module) -> None:
        raise UsageError("model = 'vit': no weights here; pretrained = false begins without")

    settings = config_of(task=register_task(task_of(gone), "gone"), batch_size=10)
    grid = grid_of(settings)
    with pytest.raises(UsageError, match=r"^model = 'vit': no weights here"):
        server_app(grid, Context(1, 1, {}, RecordDict(), settings.to_run_config()))
    assert grid.sent == []
    assert list(folder.iterdir()) == []


@pytest.mark.processes
def test_train_loads_them_in_its_own_process_alone(folder: Path) -> None:
    log = folder / "calls"
    result = flower_blsgd.train(
        task_of(noting(log)),
        workers=f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow",
        epochs=1,
        batch_size=10,
        local_steps_fast=4,
        local_steps_slow=2,
        threads=1,
        processes_per_device=1,
        learning_rate=TINY,
        weight_decay=0.0,
        quiet=True,
    )
    assert log.read_text() == f"{os.getpid()}\n"
    state: dict[str, Any] = result.model.state_dict()
    assert torch.allclose(state["weight"], torch.arange(8.0).reshape(2, 4), atol=1e-5)
    assert torch.allclose(state["bias"], torch.full((2,), 0.5), atol=1e-5)
    assert result.summary["rounds"] == 5


MODULE = """
import os
import torch
from flower_blsgd import Task

def pretrained(model):
    with open(os.environ["BLSGD_TEST_CALLS"], "a") as lines:
        lines.write(f"{os.getpid()}\\n")
    with torch.no_grad():
        model.weight.copy_(torch.arange(8.0).reshape(2, 4))
        model.bias.fill_(0.5)

def task():
    points = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    labels = (points[:, 0] > 0).long()
    return Task(model=lambda: torch.nn.Linear(4, 2), train=(points, labels),
                test=(points, labels), pretrained=pretrained)
"""


@pytest.mark.engines
@pytest.mark.timeout(500)
def test_simulation_loads_them_in_the_server_app_alone(folder: Path) -> None:
    pytest.importorskip("ray")
    (folder / "with_weights.py").write_text(MODULE)
    settings = (
        f"task='with_weights:task' epochs=1 batch-size=10 local-steps-fast=4 local-steps-slow=2 "
        f"threads=1 learning-rate={TINY} weight-decay=0.0 out='{folder / 'run'}' "
        f"workers='1x cpu:{CORE} fast; 1x cpu:{CORE} slow'"
    )
    done = subprocess.run(
        [sys.executable, "scripts/flower_engine.py", "simulation", "-c", settings],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder), "BLSGD_TEST_CALLS": str(folder / "calls")},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((folder / "calls").read_text().splitlines()) == 1
    weights = load_file(folder / "run" / "model.safetensors")
    assert np.allclose(weights["weight"], np.arange(8.0).reshape(2, 4), atol=1e-5)
