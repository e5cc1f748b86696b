"""Where published weights come from: a folder, the hub, and what is said where neither is."""

from pathlib import Path
from typing import Any

import pytest

from flower_blsgd.errors import UsageError

pytest.importorskip("huggingface_hub")

import huggingface_hub

from flower_blsgd.models import weights_folder as module
from flower_blsgd.models.weights_folder import hub_folder, own_folder

HUB = "somebody/some-model"


def folder_of(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def refusal(model: Path | str, weights: bool = True) -> str:
    with pytest.raises(UsageError) as refused:
        own_folder(str(model), weights) if isinstance(model, Path) else hub_folder(model, HUB)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand for the hub: what it holds, whether it answers, and what it was asked for."""
    state: dict[str, Any] = {
        "files": ("config.json", "model.safetensors"),
        "answers": True,
        "asked": [],
        "error": None,
    }

    def download(name: str, **asked: Any) -> str:
        state["asked"].append((name, asked))
        if state["error"] is not None:
            raise state["error"]
        return str(folder_of(tmp_path / "downloaded", *state["files"]))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(module, "hub_answers", lambda: state["answers"])
    return state


def test_a_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "own", "config.json", "model.safetensors")
    assert own_folder(str(folder)) == folder.resolve()


def test_weights_in_several_files(tmp_path: Path) -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    folder = folder_of(tmp_path / "own", "config.json", *names, "model.safetensors.index.json")
    assert own_folder(str(folder)) == folder.resolve()


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder_of(tmp_path / "own", "config.json", "model.safetensors")
    assert own_folder("~/own") == (tmp_path / "own").resolve()


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_with_the_way_out(pickle: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "own", "config.json", pickle)
    message = refusal(folder)
    assert f"{pickle} is a pickle" in message
    assert "from_pretrained(OLD).save_pretrained(NEW)" in message
    assert own_folder(str(folder), weights=False) == folder.resolve()


def test_incomplete_folders(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(folder_of(tmp_path / "empty"))
    message = refusal(folder_of(tmp_path / "bare", "config.json"))
    assert "has no weights" in message
    assert "pretrained = false" in message
    broken = folder_of(tmp_path / "broken", "model.safetensors")
    (broken / "config.json").write_text("{")
    assert "its config.json cannot be read" in refusal(broken)
    (broken / "config.json").write_text("[]")
    assert "is no description of a model" in refusal(broken)


def test_the_hub_is_asked_for_safe_files_only(hub: dict[str, Any], tmp_path: Path) -> None:
    assert hub_folder("some-model", HUB) == tmp_path / "downloaded"
    ((name, asked),) = hub["asked"]
    assert name == HUB
    assert asked["allow_patterns"] == ["*.json", "*.txt", "*.safetensors"]
    assert asked["ignore_patterns"] == "*/*"
    assert not asked["local_files_only"]
    hub_folder("some-model", HUB, weights=False)
    assert hub["asked"][1][1]["allow_patterns"] == ["*.json", "*.txt"]


def test_a_folder_of_the_same_name(
    hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "some-model", "config.json", "model.safetensors")
    assert hub_folder("some-model", HUB) == tmp_path / "downloaded"
    assert own_folder("some-model") == tmp_path / "some-model"


def test_without_a_network_what_was_downloaded_is_used(hub: dict[str, Any], tmp_path: Path) -> None:
    hub["answers"] = False
    assert hub_folder("", HUB) == tmp_path / "downloaded"
    assert hub["asked"][0][1]["local_files_only"]


def test_only_the_tokenizer_was_downloaded(hub: dict[str, Any]) -> None:
    hub["answers"], hub["files"] = False, ("config.json",)
    assert "is out of reach" in refusal("some-model")


def test_hub_out_of_reach_names_both_ways(hub: dict[str, Any]) -> None:
    hub["answers"] = False
    hub["error"] = huggingface_hub.errors.LocalEntryNotFoundError("not there\nand more")
    assert refusal("some-model") == (
        f"model = 'some-model': the hub with {HUB} is out of reach; give model=<folder> that "
        "holds config.json, model.safetensors and what belongs to them, or set pretrained = "
        "false for fresh weights"
    )


def test_hub_refuses(hub: dict[str, Any]) -> None:
    hub["error"] = RuntimeError("401: not yours\nask somebody")
    assert f"the hub with {HUB} refused it (401: not yours); give" in refusal("some-model")
