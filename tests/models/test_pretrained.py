"""Published models: where they are found, what is read of them, what is refused."""

import contextlib
import json
from collections.abc import Callable
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
    hf_hub_folder,
    load_weights,
    own_folder,
    tokenizer_identity,
)
from flower_blsgd.models.text_transformer import TextTransformer, folder_config

from .hf_folders import (
    keep_weights,
    save_model,
    save_text_model,
    transformers,
    vit_config,
)

HUB = "somebody/some-model"


# folders


def folder_of(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "own", "config.json", "model-00001-of-00002.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_folder(str(folder)) == own_folder("~/own") == folder.resolve()


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    pickle = "pytorch_model.bin"
    folder = folder_of(tmp_path / "own", "config.json", pickle)
    message = refusal(own_folder, str(folder))
    assert f"{pickle} is a pickle" in message
    assert "from_pretrained(OLD).save_pretrained(NEW)" in message
    assert own_folder(str(folder), weights=False) == folder.resolve()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "has no config.json"),
        ("{}", "or set pretrained = false"),
        ("{", "its config.json cannot be read"),
        ("[]", "its config.json must hold a JSON object"),
    ],
)
def test_incomplete_folders(config: str | None, expected: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert expected in refusal(own_folder, str(tmp_path))


# the hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand for the hub: what it holds, whether it answers, and what it was asked for."""
    state: dict[str, Any] = {
        "files": ("config.json", "model.safetensors"),
        "reachable": True,
        "asked": [],
        "error": None,
    }

    def download(name: str, **asked: Any) -> str:
        state["asked"].append((name, asked))
        if state["error"] is not None:
            raise state["error"]
        return str(folder_of(tmp_path / "downloaded", *state["files"]))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(module, "hf_hub_reachable", lambda: state["reachable"])
    return state


def test_the_hub_is_asked_for_safe_files_only(
    hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path / "some-model", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)  # where a folder has the same name
    assert hf_hub_folder("some-model", HUB) == tmp_path / "downloaded"
    ((name, asked),) = hub["asked"]
    assert name == HUB
    assert asked["allow_patterns"] == ["*.json", "*.txt", "*.safetensors"]
    assert asked["ignore_patterns"] == "*/*"
    assert not asked["local_files_only"]
    hf_hub_folder("some-model", HUB, weights=False)
    assert hub["asked"][1][1]["allow_patterns"] == ["*.json", "*.txt"]


def test_hub_out_of_reach(hub: dict[str, Any], tmp_path: Path) -> None:
    hub["reachable"] = False
    assert hf_hub_folder("", HUB) == tmp_path / "downloaded"  # what was downloaded is used
    assert hub["asked"][0][1]["local_files_only"]
    (tmp_path / "downloaded" / "model.safetensors").unlink()
    hub["files"] = ("config.json",)  # only the tokenizer was
    assert "is out of reach" in refusal(hf_hub_folder, "some-model", HUB)
    hub["error"] = huggingface_hub.errors.LocalEntryNotFoundError("not there\nand more")
    assert refusal(hf_hub_folder, "some-model", HUB) == (
        f"model = 'some-model': the HF hub with {HUB} is out of reach; give model=<folder> with "
        "config.json, model.safetensors and what belongs to them, or set pretrained = false for "
        "fresh weights"
    )


# weights


def loaded(folder: Path, kind: str) -> tuple[Any, dict[str, Tensor], list[str]]:
    """Return a fresh model after `load_weights`, its weights before, and the log's warnings."""
    torch.manual_seed(0)
    if kind == "vit":
        config = transformers.ViTConfig.from_pretrained(folder, num_labels=4)
        network = transformers.ViTForImageClassification(config)
    else:
        network = TextTransformer(folder_config("own", folder, 4)).network
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state = torch.random.get_rng_state()
    with captured_log() as log:
        load_weights(network, folder, "own")
    assert torch.equal(torch.random.get_rng_state(), state)
    return network, before, log.warnings


def save(folder: Path, kind: str, head: str = "", classes: int = 4) -> Any:
    """Save a model with its usual head, or another; return it."""
    if kind != "vit":
        return save_text_model(folder, kind, head or "SequenceClassification", classes)
    torch.manual_seed(8)
    name = "ViTModel" if head == "Model" else f"ViTFor{head or 'ImageClassification'}"
    model = getattr(transformers, name)(vit_config(num_labels=classes))
    save_model(folder, model)
    return model


KINDS = ("bert", "vit")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_with_head(
    kind: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    """In half precision they become float32; transformers itself prints nothing."""
    saved = save(tmp_path, kind)
    save_model(tmp_path, saved.half())
    capfd.readouterr()
    network, _, warnings = loaded(tmp_path, kind)
    assert capfd.readouterr() == ("", "")
    assert not recwarn
    for name, tensor in saved.state_dict().items():
        assert network.state_dict()[name].dtype == torch.float32
        assert torch.equal(network.state_dict()[name], tensor.float()), name
    assert warnings == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["", "Model"])
def test_head_of_another_size_or_none_stays_fresh(head: str, kind: str, tmp_path: Path) -> None:
    saved = save(tmp_path, kind, head, classes=3).state_dict()
    prefix = f"{kind}." if head else ""
    network, before, warnings = loaded(tmp_path, kind)
    for name, tensor in network.state_dict().items():
        fresh = "classifier" in name if head else name.startswith("classifier")
        wanted = before[name] if fresh else saved[name.removeprefix(prefix)]
        assert torch.equal(tensor, wanted), name
    (line,) = warnings
    assert line.startswith("model = 'own' begins with fresh weights in classifier.bias, classifier")
    assert ("has no part for pooler" in line) == (kind == "vit" and head == "Model")


def test_weights_without_pooler(tmp_path: Path) -> None:
    """Saved by those that were trained on words alone."""
    saved = save(tmp_path, "bert").state_dict()
    keep_weights(tmp_path, lambda name: "pooler" not in name)
    network, before, warnings = loaded(tmp_path, "bert")
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name] if "pooler" in name else saved[name]), name
    dense = "bert.pooler.dense"
    assert warnings == [f"model = 'own' begins with fresh weights in {dense}.bias, {dense}.weight"]


@pytest.mark.parametrize(
    ("kind", "keep", "count", "one"),
    [
        # Of 5 tensors of the embeddings, 16 of each of two layers, 4 of them norms, and a pooler.
        ("bert", lambda name: "layer.1." not in name, "16 of the 39", "bert.encoder.layer.1.att"),
        ("vit", lambda name: "layernorm_before.weight" not in name, "1 of the ", "vit.layers.0."),
    ],
)
def test_body_that_is_not_whole(
    kind: str, keep: Callable[[str], bool], count: str, one: str, tmp_path: Path
) -> None:
    save(tmp_path, kind)
    keep_weights(tmp_path, keep)
    message = refusal(loaded, tmp_path, kind)
    assert f"model = 'own': its weights lack {count}" in message
    assert f"such as {one}" in message
    assert "set pretrained = false for fresh ones" in message


def test_unreadable_weights(tmp_path: Path) -> None:
    save(tmp_path, "bert")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = refusal(loaded, tmp_path, "bert")
    assert f"model = 'own': the weights in {tmp_path} cannot be read (" in message
    assert "pretrained = false" in message


# tokenizers


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    save_text_model(tmp_path / "whole")
    encoded = folder_tokenizer("own", tmp_path / "whole").encode("The vote, zebra")
    assert encoded.tokens == ["[CLS]", "the", "vote", "[UNK]", "[UNK]", "[SEP]"]
    # A list of word pieces alone, as BERT's folders once were.
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "vote", "##s", "the"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert folder_tokenizer("own", tmp_path).encode("The votes").ids == [2, 7, 5, 6, 3]


def test_identity_of_a_tokenizer_is_that_of_its_files(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        save_text_model(folder)
    identity = tokenizer_identity("own", one)
    assert tokenizer_identity("own", other) == identity
    (other / "model.safetensors").unlink()
    assert tokenizer_identity("own", other) == identity
    settings = json.loads((other / "tokenizer.json").read_text())
    settings["normalizer"]["lowercase"] = False
    (other / "tokenizer.json").write_text(json.dumps(settings))
    assert tokenizer_identity("own", other) != identity


def test_missing_or_broken_tokenizer(tmp_path: Path) -> None:
    save_text_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "its tokenizer cannot be read" in refusal(folder_tokenizer, "own", tmp_path)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    message = refusal(tokenizer_identity, "own", tmp_path)
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
        folder_tokenizer("own", tmp_path)
    assert not ran.exists()
