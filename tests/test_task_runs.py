"""Whole runs of a user's own task, with weights to begin with, and in micro-batches."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file
from torch import nn

from flower_blsgd import (
    EpochRequest,
    LossTable,
    SampleList,
    Task,
    UniformSampler,
    evaluate_run,
    train,
)
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.protocol import TrainOrder
from flower_blsgd.tasks import register_task
from server.blsgd_server import app as server_app

from .small_training import points_task
from .test_run import config_of, grid_of, run
from .worker.test_trace import operators

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_task"
CORE = usable_cores()[0]
WORKERS = f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow"
STEPS = {"local_steps_fast": 8, "local_steps_slow": 4, "threads": 1}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# the example of an own task


TRAP = "raise SystemExit('this is not the library that you look for: ' + __name__)\n"
LIBRARIES = ("queue", "json", "numpy", "torch", "flwr", "flower_blsgd", "clients", "server")


def blsgd(folder: Path, *arguments: str) -> str:
    """Run the command as its entry point does, which does not look at the current folder."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "flower_blsgd", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.processes
def test_task_of_the_current_folder_is_found_by_all(tmp_path: Path) -> None:
    """By server, workers and `blsgd evaluate`; modules beside it hide no library.

    (10 + 4) x 16 = 224 of 2,000 samples a round: 8 rounds.
    """
    folder = tmp_path / "own_task"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    for name in LIBRARIES:
        (folder / f"{name}.py").write_text(TRAP)
    settings = (
        "epochs=1 local-steps-fast=10 local-steps-slow=4 batch-size=16 threads=1 seed=3 "
        f"task=own_task:task workers='{WORKERS}'"
    )
    printed = blsgd(folder, "run", "-c", settings, "-s", "out=run", "--trace")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["task"] == "own_task:task"
    assert (summary["rounds"], summary["samples"]) == (8, 8 * 224)
    assert [worker["samples"] for worker in summary["workers"]] == [8 * 160, 8 * 64]
    assert summary["failures"] == []
    assert "2,000 training and 500 test samples" in printed
    assert f"test accuracy {summary['accuracy']:.2%}" in printed
    traces = folder / "run" / "trace"
    assert f"traces of one round: {traces} (open them in ui.perfetto.dev)" in printed
    steps = [
        operators(traces / f"worker-{number}.json").count("Optimizer.step#SGD.step")
        for number in range(2)
    ]
    assert steps == [10, 4]
    printed = blsgd(folder, "evaluate", "run", "--device", "cpu")
    assert printed.startswith(f"test accuracy {summary['accuracy']:.2%}, ")
    assert "on 500 samples (run, computed on cpu)" in printed


# weights to begin with: loaded once in a run, by the server, before anything starts


def run_config(pretrained: Callable[[nn.Module], None]) -> RunConfig:
    """Return the settings of a run of 300 points in two classes."""
    task = points_task(300, 100, pretrained=pretrained)
    name = register_task(task)
    return config_of(task=name, epochs=1, batch_size=10, local_steps_fast=4, out="run")


def test_first_round_begins_with_pretrained_weights() -> None:
    """Here server and workers are one process, so every call counts."""
    calls: list[nn.Module] = []

    def begin(model: nn.Module) -> None:
        calls.append(model)
        model.load_state_dict(
            {"weight": torch.arange(8.0).reshape(2, 4), "bias": torch.full((2,), 0.5)}
        )

    settings = run_config(begin)
    grid = grid_of(settings)
    server_app(grid, Context(1, 1, {}, RecordDict(), settings.to_run_config()))
    assert len(calls) == 1
    orders = [message for message in grid.sent if message.metadata.message_type == "train"]
    first = TrainOrder.from_message(orders[0])
    assert first.round == 1
    assert first.arrays["weight"].numpy().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert first.arrays["bias"].numpy().tolist() == [0.5, 0.5]


# only what is trained is sent and saved


class OnFrozenBase(nn.Module):
    """A large base with random weights that are never trained, and a small head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 512).requires_grad_(False)
        self.head = nn.Linear(512, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.base(inputs).relu())
        return outputs


def test_frozen_weights_stay_with_the_workers() -> None:
    inputs = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    targets = (inputs.sum(dim=1) > 0).long()
    task = Task(model=OnFrozenBase, train=(inputs, targets), test=(inputs, targets))
    settings = {"seed": 5, "learning_rate": 0.1, "out": "run"}
    summary = run(config_of(task=register_task(task), **settings)).summary
    saved = load_file("run/model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {
        "head.weight": (2, 512),
        "head.bias": (2,),
    }
    assert summary["accuracy"] > 0.9
    # The base is that of the run, so the loaded model is as good as the one that was evaluated.
    assert evaluate_run("run", task).accuracy == summary["accuracy"]


# custom parts of the algorithm


class Backwards(UniformSampler):
    """Counts how often it is used."""

    used = 0

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        type(self).used += 1
        return super().sample_lists(request, table)


@pytest.mark.processes
def test_sampler_may_be_an_object() -> None:
    """`tests/algorithm/test_catalog.py` has that of a module."""
    settings: dict[str, Any] = {"sampler": Backwards(), "quiet": True, **STEPS}
    result = train("digits", workers=WORKERS, epochs=1, **settings)
    assert Backwards.used
    assert result.summary["sampler"].endswith(":Backwards")
