"""Tasks by name, and a user's own by module:function."""

from pathlib import Path

import pytest
import torch

from flower_blsgd import tasks
from flower_blsgd.errors import UsageError
from flower_blsgd.models import vision_transformer
from flower_blsgd.tasks import Task, check_weights, load_task, register_task
from flower_blsgd.tasks.task import with_validation

OWN = """
import torch
from flower_blsgd import Task

TEXT = "not a function"


def plain():
    data = (torch.zeros(4, 2), torch.zeros(4).long())
    return Task(model=lambda: torch.nn.Linear(2, 2), train=data, test=data)


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
    monkeypatch.setattr(tasks, "_REGISTERED", {})
    task = plain()
    assert register_task(task) == "given-in-python"
    return task


def test_load_task_that_was_registered(registered: Task) -> None:
    assert load_task("given-in-python") is registered
    other = plain()
    register_task(other, "digits")  # before the benchmark of that name
    assert load_task("digits") is other
    register_task(registered, "digits")
    assert load_task("digits") is registered


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"data": "here"}, "data = 'here'"), ({"skip_bad": True}, "skip-bad = true")],
)
def test_load_task_refuses_settings_that_it_does_not_take(
    registered: Task, own_module: str, settings: dict[str, object], message: str
) -> None:
    for name in ("given-in-python", f"{own_module}:plain"):
        with pytest.raises(UsageError, match=f"^{message}: task = '{name}' does not take it"):
            load_task(name, **settings)


def test_load_task_with_a_validation_share(registered: Task) -> None:
    task = load_task("given-in-python", validation_share=0.3, seed=5)
    assert task.fingerprint() == with_validation(registered, 0.3, 5).fingerprint()


def test_load_task_of_ones_own(own_module: str) -> None:
    assert load_task(f"{own_module}:plain").num_train == 4
    task = load_task(f"{own_module}:picky", "folder", "big")
    assert task.model.settings == ("folder", "big", False)  # type: ignore[attr-defined]
    task = load_task(f"{own_module}:picky", "a", "b", skip_bad=True)
    assert task.model.settings == ("a", "b", True)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit", "did you mean digits?"),
        ("zzz", "known: ag-news, cifar10, cifar100, digits, flowers102, tiny-imagenet"),
        ("no_such_module_here:task", "PYTHONPATH"),
        ("{own}:no_such_task", "no_such_task"),
        ("{own}:wrong", "returned str, not a Task"),
        ("{own}:TEXT", "TEXT"),
        (".relative:plain", "relative"),
    ],
)
def test_load_task_refuses_by_name(own_module: str, name: str, message: str) -> None:
    name = name.replace("{own}", own_module)
    with pytest.raises(UsageError) as refused:
        load_task(name)
    assert str(refused.value).startswith(f"task = {name!r}")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


# published weights, looked for before any data are read


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the hub, which is out of reach, was asked for."""
    asked: list[str] = []

    def out_of_reach(model: str, hf_hub_name: str) -> Path:
        asked.append(hf_hub_name)
        raise UsageError(f"model = {model!r}: out of reach")

    monkeypatch.setattr(vision_transformer, "hf_hub_folder", out_of_reach)
    return asked


def test_weights_out_of_reach(asked: list[str]) -> None:
    for model in ("wrn-10-1", "vit-micro-16", "resnet8"):
        check_weights("cifar100", model)
    check_weights("cifar100", "vit-b-16", pretrained=False)
    assert asked == []
    for task, model in (("cifar100", "vit-b-16"), ("tiny-imagenet", "")):
        with pytest.raises(UsageError, match="model = 'vit-b-16': out of reach"):
            check_weights(task, model)
    assert set(asked) == {"google/vit-base-patch16-224"}


@pytest.mark.parametrize("task", ["cifar10", "ag-news"])
def test_folder_without_weights(task: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UsageError, match=r"the folder has no weights; .*pretrained = false"):
        check_weights(task, str(tmp_path))
    check_weights(task, str(tmp_path), pretrained=False)
    (tmp_path / "model.safetensors").touch()
    check_weights(task, str(tmp_path))
