"""Whoever evaluates takes as many samples at once as the task says."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flower_blsgd import Task
from flower_blsgd.saved_run import evaluate_run
from flower_blsgd.tasks import register_task
from flower_blsgd.tasks.task import correct

from .test_run import config_of, grid_of, run

SIZE = 7


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def task_of(sizes: list[int], evaluation_batch_size: int = SIZE) -> Task:
    """Return a task of 60 points, 20 to test on, which notes how many it is tested on at once."""

    def noting(outputs: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(targets))
        return correct(outputs, targets)

    points = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
    labels = (points[:, 0] > 0).long()
    return Task(
        model=lambda: nn.Linear(3, 2),
        train=(points[:60], labels[:60]),
        test=(points[60:], labels[60:]),
        metric=noting,
        evaluation_batch_size=evaluation_batch_size,
    )


@pytest.mark.parametrize("where", ["workers", "server"])
def test_run_evaluates_in_batches_of_the_task(where: str) -> None:
    sizes: list[int] = []
    name = register_task(task_of(sizes), f"batches-{where}")
    config = config_of(
        task=name, epochs=1, batch_size=5, local_steps_fast=2, evaluate_on=where, out="run"
    )
    run(config, grid_of(config))
    assert sizes == [2, 7, 7, 6]  # the first is the try of two samples before the run


def test_saved_run_evaluates_in_batches_of_the_task() -> None:
    sizes: list[int] = []
    config = config_of(
        task=register_task(task_of([], 20), "whole"), epochs=1, batch_size=5, out="run"
    )
    report = run(config, grid_of(config))
    evaluation = evaluate_run("run", task_of(sizes), device="cpu")
    assert sizes == [7, 7, 6]
    assert evaluation.accuracy == report.summary["accuracy"]
