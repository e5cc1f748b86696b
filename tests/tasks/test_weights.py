"""Weights that are out of reach are told before any data are read."""

from pathlib import Path

import pytest

from flower_blsgd.errors import UsageError
from flower_blsgd.models import vision_transformer_weights
from flower_blsgd.tasks.weights import check_weights

TASKS = ("cifar100", "flowers102", "tiny-imagenet")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the hub, which is out of reach, was asked for."""
    asked: list[str] = []

    def out_of_reach(model: str, hub_name: str) -> Path:
        asked.append(hub_name)
        raise UsageError(f"model = {model!r}: out of reach")

    monkeypatch.setattr(vision_transformer_weights, "hub_folder", out_of_reach)
    return asked


@pytest.mark.parametrize("task", TASKS)
def test_hub_out_of_reach(task: str, asked: list[str]) -> None:
    with pytest.raises(UsageError, match="model = 'vit-b-16': out of reach"):
        check_weights(task, "vit-b-16")
    assert asked == ["google/vit-base-patch16-224"]
    check_weights(task, "vit-b-16", pretrained=False)
    assert len(asked) == 1


def test_default_model_is_asked_for_too(asked: list[str]) -> None:
    with pytest.raises(UsageError, match="model = 'vit-b-16': out of reach"):
        check_weights("tiny-imagenet")
    check_weights("cifar100")
    check_weights("flowers102")
    assert len(asked) == 1


@pytest.mark.parametrize("task", TASKS)
def test_models_without_published_weights_ask_nobody(task: str, asked: list[str]) -> None:
    for model in ("wrn-10-1", "vit-micro-16"):
        check_weights(task, model)
    assert not asked


@pytest.mark.parametrize("task", TASKS)
def test_folder_without_weights(task: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UsageError, match=r"the folder has no weights; .*pretrained = false"):
        check_weights(task, str(tmp_path))
    check_weights(task, str(tmp_path), pretrained=False)
    (tmp_path / "model.safetensors").touch()
    check_weights(task, str(tmp_path))


def test_unknown_model_is_told_as_ever() -> None:
    with pytest.raises(UsageError, match="model = 'resnet9' is neither a wrn-DEPTH-WIDTH"):
        check_weights("cifar100", "resnet9")


@pytest.mark.parametrize("task", ["digits", "my.module:task", "nothing"])
def test_other_tasks_are_not_asked(task: str) -> None:
    check_weights(task, "anything")
