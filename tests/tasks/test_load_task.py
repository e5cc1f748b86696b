"""Tasks by name, and a user's own by module:function."""

from pathlib import Path

import pytest
import torch

from flower_blsgd import tasks
from flower_blsgd.errors import UsageError
from flower_blsgd.tasks import MODELS, TASKS, Task, load_model, load_task, register_task

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


def picky(data, model, skip_bad=False):
    task = plain()
    task.model.settings = (data, model, skip_bad)
    return task


def wrong():
    return "a text"
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_task_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_task_module"


def plain() -> Task:
    data = (torch.arange(20.0).reshape(10, 2), torch.arange(10))
    return Task(model=lambda: torch.nn.Linear(2, 7), train=data, test=data)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(tasks, "_GIVEN", {})
    task = plain()
    assert register_task(task) == "given-in-python"
    return task


def test_load_task_by_name() -> None:
    assert isinstance(load_task("digits"), Task)
    images = ["digits", "cifar10", "cifar100", "flowers102", "tiny-imagenet"]
    assert sorted(TASKS) == sorted([*images, "ag-news"])
    assert sorted(MODELS) == sorted(images)  # what words there are, only the data of a text know


def test_load_task_that_was_given(registered: Task) -> None:
    assert load_task("given-in-python") is registered
    other = plain()
    register_task(other, "digits")  # before the names that everybody has
    assert load_task("digits") is other
    register_task(registered, "digits")
    assert load_task("digits") is registered


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"data": "here"}, "data = 'here'"),
        ({"model": "big"}, "model = 'big'"),
        ({"skip_bad": True}, "skip-bad = true"),
    ],
)
def test_load_task_refuses_settings_that_nobody_looks_at(
    registered: Task, own_module: str, settings: dict[str, object], told: str
) -> None:
    for name in ("given-in-python", f"{own_module}:plain"):
        with pytest.raises(UsageError, match=f"^{told}: task = '{name}' does not take it"):
            load_task(name, **settings)


def test_load_task_hands_skip_bad_to_those_who_take_it(own_module: str) -> None:
    task = load_task(f"{own_module}:picky", "a", "b", skip_bad=True)
    assert task.model.settings == ("a", "b", True)
    with pytest.raises(UsageError, match="skip-bad = true: task = 'digits' does not take it"):
        load_task("digits", skip_bad=True)


def test_load_task_with_a_validation_share(registered: Task) -> None:
    task = load_task("given-in-python", validation_share=0.3, seed=5)
    assert (task.num_train, task.num_test) == (7, 3)
    again = load_task("given-in-python", validation_share=0.3, seed=5)
    assert again.fingerprint() == task.fingerprint() != registered.fingerprint()


@pytest.mark.parametrize(
    ("task", "model", "classes", "parameters"),
    [
        ("digits", "", 10, 151_306),
        ("digits", "cnn-batchnorm", 10, 151_306 + 192),
        ("cifar10", "", 10, 269_722),
        ("cifar10", "resnet20-b", 10, 272_474),
        ("cifar10", "", 100, 269_722 + 90 * 65),
    ],
)
def test_load_model_without_data(task: str, model: str, classes: int, parameters: int) -> None:
    made = load_model(task, model, classes)
    assert sum(weight.numel() for weight in made.parameters()) == parameters


def test_load_model_of_ones_own(registered: Task, own_module: str) -> None:
    assert load_model("given-in-python").out_features == 7
    assert load_model(f"{own_module}:plain").out_features == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("digits", "", 7), "10 classes, but the model 7"),
        (("digits", "cnm"), "did you mean cnn"),
        (("cifar10", "resnet21"), "did you mean resnet20"),
        (("cifar11",), "did you mean cifar10"),
    ],
)
def test_load_model_refuses(arguments: tuple[object, ...], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        load_model(*arguments)


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
        ("zzz", "known: ag-news, cifar10, cifar100, digits, flowers102, tiny-imagenet"),
        ("no_such_module_here:task", "PYTHONPATH"),
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
