"""Tasks by name, and a user's own by module:function."""

from pathlib import Path

import pytest

from flower_blsgd.errors import UsageError
from flower_blsgd.tasks import TASKS, Task, load_task

OWN = """
import torch
from flower_blsgd import Task

TEXT = "not a function"


def plain():
    data = (torch.zeros(4, 2), torch.zeros(4).long())
    return Task(model=lambda: torch.nn.Linear(2, 2), train=data, test=data)


def with_settings(data, model):
    task = plain()
    task.model.settings = (data, model)
    return task


def wrong():
    return "a text"
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_task_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_task_module"


@pytest.mark.parametrize("name", list(TASKS))
def test_load_task_by_name(name: str) -> None:
    assert isinstance(load_task(name), Task)


def test_load_task_hands_on_data_and_model() -> None:
    with pytest.raises(UsageError, match="data = 'here'"):
        load_task("digits", data="here")
    assert len(load_task("digits", model="cnn-batchnorm").model().state_dict()) > len(
        load_task("digits").model().state_dict()
    )


def test_load_task_of_ones_own(own_module: str) -> None:
    assert load_task(f"{own_module}:plain").num_train == 4
    task = load_task(f"{own_module}:with_settings", "folder", "big")
    assert task.model.settings == ("folder", "big")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("digit", "did you mean digits?"),
        ("zzz", "known: digits"),
        ("no_such_module_here:task", "no_such_module_here"),
        ("{own}:no_such_task", "no_such_task"),
        ("{own}:wrong", "returned str, not a Task"),
        ("{own}:TEXT", "TEXT"),
        (":plain", ":plain"),
        (".relative:plain", "relative"),
    ],
)
def test_load_task_refuses_by_name(own_module: str, name: str, told: str) -> None:
    name = name.replace("{own}", own_module)
    with pytest.raises(UsageError) as refused:
        load_task(name)
    assert str(refused.value).startswith(f"task = {name!r}")
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
