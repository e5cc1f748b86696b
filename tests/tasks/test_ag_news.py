"""The benchmark of texts: its models, and a run on a few texts, saved and loaded again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from safetensors.torch import save_file

from flower_blsgd import Task, evaluate_run, load
from flower_blsgd.cli import main as cli
from flower_blsgd.config import RunConfig
from flower_blsgd.data.text_data import vocabulary_of_rows
from flower_blsgd.errors import UsageError
from flower_blsgd.models.text_encoder import TextEncoder
from flower_blsgd.models.text_transformer import TextTransformer
from flower_blsgd.results.folder import RunFolder
from flower_blsgd.run import train_on
from flower_blsgd.tasks import OPTIONS, load_benchmark, load_task
from flower_blsgd.tasks import ag_news as module
from flower_blsgd.tasks.ag_news import TextModel, TextShape, text_model
from flower_blsgd.tasks.task import check_task

from ..data.text_files import CLASS_NAMES, TRAIN, make_texts
from ..in_process_grid import InProcessGrid
from ..models.hf_folders import VOCABULARY, save_text_model
from ..refusal import refusal
from ..test_run import config_of, grid_of

MODELS = ("encoder", "distilbert-micro")


def ag_news(data: str, model: str = "", **options: Any) -> Task:
    return load_task("ag-news", data, model, **options)


# models


def chosen(name: str, **settings: Any) -> TextModel:
    return text_model(name, {"max_tokens": 16, "pretrained": False, "dropout": "auto", **settings})


def made(model: TextModel, vocabulary: int = 30) -> Any:
    return model.model(TextShape(vocabulary, longest=9))


def refused(name: str, **settings: Any) -> str:
    return refusal(chosen, name, **settings)


@pytest.mark.parametrize("pretrained", [True, False])
def test_models_that_are_always_fresh(pretrained: bool) -> None:
    """Made for their texts; saved weights show for which."""
    encoder = chosen("encoder", pretrained=pretrained)
    network = made(encoder)
    assert isinstance(network, TextEncoder)
    assert (network.words.num_embeddings, network.positions.num_embeddings) == (30, 9)
    assert TextShape.of_weights(network.state_dict()) == TextShape(30, 9)
    micro = chosen("distilbert-micro", pretrained=pretrained)
    network = made(micro)
    assert (network.network.config.vocab_size, network.network.config.dim) == (30, 64)
    assert TextShape.of_weights(network.state_dict()) == TextShape(30, 1)
    for model, marked in ((encoder, False), (micro, True)):
        assert model.pretrained is None
        assert model.tokenizer.identity == vocabulary_of_rows(marked=marked).identity


def test_distilbert_fresh_and_published() -> None:
    """Rows that fill less of its vocabulary leave the rest unused: the model stays as published."""
    fresh, published = (chosen("distilbert", pretrained=pretrained) for pretrained in (False, True))
    for model in (fresh, published):
        with torch.device("meta"):
            network = made(model)
        assert isinstance(network, TextTransformer)
        assert sum(p.numel() for p in network.parameters()) == 66_956_548
    assert fresh.pretrained is None
    assert fresh.tokenizer.identity == vocabulary_of_rows(marked=True).identity
    assert published.pretrained is not None
    assert published.tokenizer.identity == "hub distilbert/distilbert-base-uncased"


def test_architecture_of_a_folder_without_its_weights(tmp_path: Path) -> None:
    """Workers need no more; the server refuses them where they are a pickle."""
    save_text_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    model = chosen(str(tmp_path))
    network = made(model)
    assert network.network.config.vocab_size == VOCABULARY
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    assert model.pretrained is not None
    model.pretrained(network)  # looks for no weights
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())
    model = chosen(str(tmp_path), pretrained=True)
    network = made(model)
    assert model.pretrained is not None
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is a pickle"):
        model.pretrained(network)


def test_tokenizer_that_knows_more_than_the_model(tmp_path: Path) -> None:
    save_text_model(tmp_path)
    with pytest.raises(UsageError, match="its tokenizer knows 41 tokens, but its model 40"):
        made(chosen(str(tmp_path)), vocabulary=41)


def test_texts_longer_than_the_model_takes() -> None:
    assert refused("distilbert", max_tokens=513) == (
        "max-tokens = 513: model = 'distilbert' takes at most 512; set max-tokens = 512"
    )
    chosen("distilbert", max_tokens=512)


def test_unknown_models() -> None:
    assert "is not known; did you mean distilbert" in refused("distilbort")
    assert "there is no such folder; known: encoder, distilbert" in refused("./somewhere")


# tasks and runs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))
    return str(make_texts(tmp_path / "own", names=CLASS_NAMES))


def test_options_reach_data_and_model(folder: str) -> None:
    rows = [*TRAIN, (None, 1)]
    make_texts(Path(folder), rows, names=CLASS_NAMES)
    with pytest.raises(UsageError, match="row 6 of train has no text; skip-bad = true"):
        ag_news(folder, "encoder")
    options: dict[str, Any] = {"skip_bad": True, "max_samples": 5, "max_tokens": 8}
    task = ag_news(folder, "encoder", dropout=0.35, **options)
    assert task.num_train == 5
    prepared = load_benchmark("ag-news").prepare(folder, "encoder", {**OPTIONS, **options})
    assert prepared is not None
    assert task.fingerprint() == prepared.fingerprint
    check_task(task)
    assert (task.train[0].dtype, task.evaluation_batch_size) == (np.int32, 128)
    assert np.array_equal(task.train[0], prepared.train[0])
    assert 0.35 in {m.p for m in task.model().modules() if isinstance(m, torch.nn.Dropout)}
    with pytest.raises(UsageError, match="split = 'paper'"):
        ag_news(folder, "encoder", split="paper")


def test_own_folder_with_weights(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_text_model(tmp_path / "bert")
    checked = []
    monkeypatch.setattr(module, "check_padding", lambda model, name: checked.append(model))
    task = ag_news(folder, str(tmp_path / "bert"))
    check_task(task)
    model = task.initial_model(3)
    assert checked == [model]
    assert tokenizer_of(task) != tokenizer_of(ag_news(folder, "distilbert-micro"))
    for name, tensor in saved.state_dict().items():
        assert torch.equal(model.state_dict()[f"network.{name}"], tensor)
    assert any(
        not torch.equal(tensor, model.state_dict()[name])
        for name, tensor in task.fresh_model(3).state_dict().items()
    )


def test_weights_are_looked_for_before_data_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    save_text_model(tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").unlink()
    settings: dict[str, Any] = {"task": "ag-news", "data": str(tmp_path / "none")}
    bert, no_data = str(tmp_path / "bert"), "none' is not a folder"
    for model, pretrained, message in (
        ("", True, "base-uncased is out of reach; give model=<folder> .* or set pretrained = fals"),
        (bert, True, "the folder has no weights"),
        ("encoder", True, no_data),
        ("", False, no_data),
        (bert, False, no_data),
    ):
        config = RunConfig(model=model, pretrained=pretrained, **settings)
        with pytest.raises(UsageError, match=message):
            train_on(InProcessGrid({}), config)


def tokenizer_of(task: Task) -> bytes:
    return task.assets["tokenizer.json"].read_bytes()


def leave_run(out: Path, task: Task, data: str, model: str) -> torch.nn.Module:
    """Write what a run leaves; return its model."""
    config = RunConfig(task="ag-news", data=data, model=model, out=str(out))
    folder = RunFolder.new(str(out), "")
    folder.write_config(config.to_run_config())
    folder.add_assets(task.assets)
    made = task.fresh_model(0)
    save_file(made.state_dict(), out / "model.safetensors")
    return made


OTHER_ROWS = [(text.replace("the", "zebra"), label) for text, label in TRAIN]


@pytest.mark.parametrize("model", MODELS)
def test_a_run_is_loaded_without_its_data(model: str, folder: str, tmp_path: Path) -> None:
    task = ag_news(folder, model)
    saved = leave_run(tmp_path / "run", task, folder, model).state_dict()
    accuracy = evaluate_run(tmp_path / "run", device="cpu").accuracy
    Path(folder).rename(tmp_path / "moved")
    loaded = load(tmp_path / "run").state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    result = evaluate_run(tmp_path / "run", data=str(tmp_path / "moved"), device="cpu")
    assert result.accuracy == accuracy


@pytest.mark.parametrize("model", MODELS)
def test_data_whose_numbers_mean_other_words(
    model: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equally many words, and equally long texts: only the tokenizer differs."""
    task = ag_news(folder, model)
    leave_run(tmp_path / "run", task, folder, model)
    other = str(make_texts(tmp_path / "other", OTHER_ROWS, names=CLASS_NAMES))
    theirs = ag_news(other, model)
    assert theirs.train[0].shape == task.train[0].shape
    assert tokenizer_of(theirs) != tokenizer_of(task)
    capsys.readouterr()
    assert cli.main(["evaluate", str(tmp_path / "run"), "--data", other]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert f"data = {other!r}" in line
    assert "tokenizer.json" in line
    assert "evaluate with the data of the run" in line


def test_a_run_with_an_own_model_is_trained_saved_and_loaded(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_text_model(tmp_path / "folder", "distilbert", head="Model")
    make_texts(Path(folder), TRAIN * 4, names=CLASS_NAMES)
    out = tmp_path / "run"
    steps = {"batch_size": 4, "local_steps_fast": 2, "local_steps_slow": 1}
    config = config_of(
        task="ag-news", data=folder, model="folder", optimizer="adamw", out=str(out), **steps
    )
    train_on(grid_of(config), config)
    assert json.loads((out / "summary.json").read_text())["failures"] == []
    assert isinstance(load(out), TextTransformer)
    result = evaluate_run(out, device="cpu")
    assert result.num_examples == 3
    assert (out / "tokenizer.json").read_bytes() == tokenizer_of(ag_news(folder, "folder"))
