"""Published models: where they are found, what is read of them, what is refused."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_blsgd.errors import UsageError

from ..log_capture import captured_log
from ..refusal import refusal

pytest.importorskip("transformers")

import huggingface_hub

from flower_blsgd.models import pretrained as module
from flower_blsgd.models.pretrained import (
    folder_tokenizer,
    hf_hub_name,
    load_weights,
    model_folder,
)
from flower_blsgd.models.text import TextTransformer, text_config

from .hf_folders import keep_weights, save_model, save_text_model

# folders


def folder_of(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "own", "config.json", "model-00001-of-00002.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_folder(str(folder)) == model_folder("~/own") == folder.resolve()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "part").mkdir()
    assert hf_hub_name("own/part") == hf_hub_name("./own") == hf_hub_name("encoder") == ""
    assert hf_hub_name("owner/name") == "owner/name"


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "own", "config.json", "pytorch_model.bin")
    message = refusal(model_folder, str(folder))
    assert "from_pretrained(OLD).save_pretrained(NEW)" in message
    assert "set pretrained = false" in message
    assert model_folder(str(folder), weights=False) == folder.resolve()
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(model_folder, str(folder))


# the hub

NAME, HUB = "distilbert", "distilbert/distilbert-base-uncased"


def test_the_hub_is_asked_for_safe_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was downloaded is used without a network too, if it is all that is needed."""
    asked: list[dict[str, Any]] = []
    there = folder_of(tmp_path / "downloaded", "config.json", "model.safetensors")
    answers: list[str | Exception] = [str(there)] * 4

    def download(name: str, **wanted: Any) -> str:
        assert name == HUB
        asked.append(wanted)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(module, "hf_hub_reachable", lambda: True)
    folder_of(tmp_path / NAME, "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)  # where a folder has the same name
    assert model_folder(NAME) == model_folder(NAME, weights=False) == there
    assert asked[0]["allow_patterns"] == ["*.json", "*.txt", "*.safetensors"]
    assert asked[1]["allow_patterns"] == ["*.json", "*.txt"]
    assert {request["ignore_patterns"] for request in asked} == {"*/*"}
    monkeypatch.setattr(module, "hf_hub_reachable", lambda: False)
    assert model_folder(HUB) == there
    assert [request["local_files_only"] for request in asked] == [False, False, True]
    (there / "model.safetensors").unlink()  # only the tokenizer was downloaded
    assert "is not reachable" in refusal(model_folder, NAME)
    answers.append(huggingface_hub.errors.LocalEntryNotFoundError("not there\nand more"))
    message = refusal(model_folder, NAME)
    assert f"model = {NAME!r}: the HF hub with {HUB} is not reachable; give model=<fold" in message
    assert "or set pretrained = false for fresh weights" in message


# weights


def loaded(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights of a network after `load_weights`, and the log's warnings."""
    torch.manual_seed(0)
    model = TextTransformer(text_config(str(folder), 4))
    with captured_log() as log:
        load_weights(model, str(folder))
    return model.network.state_dict(), log.warnings


def test_weights_with_head(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """In half precision they become float32; transformers itself prints nothing."""
    saved = save_text_model(tmp_path)
    save_model(tmp_path, saved.half())
    capfd.readouterr()
    found, warnings = loaded(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert not recwarn
    for name, tensor in saved.state_dict().items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor.float()), name
    assert warnings == []


@pytest.mark.parametrize(
    ("head", "part", "fresh"),
    [
        ("SequenceClassification", "no part", "classifier"),  # of three classes
        ("Model", "no part", "classifier"),
        ("Model", "pooler", "bert.pooler.dense"),  # as if trained on words alone
    ],
)
def test_a_head_or_pooler_may_be_fresh(head: str, part: str, fresh: str, tmp_path: Path) -> None:
    saved = save_text_model(tmp_path, "bert", head, classes=3).state_dict()
    keep_weights(tmp_path, lambda name: part not in name)
    found, (warning,) = loaded(tmp_path)
    prefix = "bert." if head == "Model" else ""
    for name, tensor in found.items():
        if "classifier" not in name and part not in name:
            assert torch.equal(tensor, saved[name.removeprefix(prefix)]), name
    assert f"model = {str(tmp_path)!r}: new random weights for " in warning
    assert f"{fresh}.bias, {fresh}.weight" in warning
    again, _ = loaded(tmp_path)  # drawn from torch's generator
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())


def test_body_that_is_not_whole(tmp_path: Path) -> None:
    save_text_model(tmp_path)
    keep_weights(tmp_path, lambda name: "layer.1." not in name)
    message = refusal(loaded, tmp_path)
    assert "its weights lack 16 tensors of the bert" in message
    assert "such as bert.encoder.layer.1.att" in message
    assert "pretrained = false" in message


# tokenizers


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    save_text_model(tmp_path / "whole")
    encoded = folder_tokenizer(str(tmp_path / "whole")).encode("The vote, zebra")
    assert encoded.tokens == ["[CLS]", "the", "vote", "[UNK]", "[UNK]", "[SEP]"]
    # A list of word pieces alone, as BERT's folders once were.
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "vote", "##s", "the"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert folder_tokenizer(str(tmp_path)).encode("The votes").ids == [2, 7, 5, 6, 3]


def test_missing_or_broken_tokenizer(tmp_path: Path) -> None:
    save_text_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "its tokenizer cannot be read" in refusal(folder_tokenizer, str(tmp_path))
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    message = refusal(folder_tokenizer, str(tmp_path))
    assert "the folder has no tokenizer; save it there" in message


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    save_text_model(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "own_code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own:\n    pass\n")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["own_code.Own", "own_code.Own"]}
    settings["tokenizer_class"] = "Own"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with contextlib.suppress(UsageError):
        folder_tokenizer(str(tmp_path))
    assert not ran.exists()
