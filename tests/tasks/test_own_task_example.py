"""examples/own_task runs as its README says."""

import sys
from pathlib import Path

import pytest
import torch

from flower_blsgd.tasks import Task, load_task
from flower_blsgd.tasks.check import check_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task"


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "own_task", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return load_task("own_task:task")


def test_example_is_a_sound_task(task: Task) -> None:
    check_task(task, "own_task:task")
    assert (task.num_train, task.num_test) == (2_000, 500)
    assert load_task("own_task:task").fingerprint() == task.fingerprint()
    assert float(task.train[1].float().mean()) == pytest.approx(0.5, abs=0.05)


def test_example_can_be_learned(task: Task) -> None:
    model = task.initial_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = task.train
    for _ in range(3):
        for batch in torch.randperm(len(inputs), generator=generator).split(16):
            loss = task.loss(model(inputs[batch]), targets[batch]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        hits = task.metric(model(task.test[0]), task.test[1])
    assert float(hits.mean()) > 0.9


def test_readme_names_the_command() -> None:
    assert "blsgd run -s task=own_task:task" in (EXAMPLE / "README.md").read_text()
