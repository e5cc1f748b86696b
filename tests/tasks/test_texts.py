"""The tasks of texts: their models, and a run on a few texts, saved and loaded again."""

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
from flower_blsgd.data.samples import vocabulary_of_rows
from flower_blsgd.errors import UsageError
from flower_blsgd.models import pretrained
from flower_blsgd.models.text import TextEncoder, TextTransformer
from flower_blsgd.results.folder import RunFolder
from flower_blsgd.run import train_on
from flower_blsgd.tasks import load_task
from flower_blsgd.tasks.by_name import load_saved_model
from flower_blsgd.tasks.check import check_task
from flower_blsgd.tasks.texts import model_maker, tokenizer_source

from ..data.text_files import CLASS_NAMES, TRAIN, make_texts
from ..in_process_grid import InProcessGrid
from ..models.hf_folders import VOCABULARY, save_text_model
from ..refusal import refusal

MODELS = ("encoder", "distilbert-micro")


# models


def made(name: str, vocabulary: int = 30, **settings: Any) -> Any:
    return model_maker(name, **settings)(4, vocabulary, 9)


def shown(network: Any, name: str) -> Any:
    """Return the model that is made for saved weights."""
    return load_saved_model("ag-news", name, network.state_dict())


def test_models_that_are_always_fresh() -> None:
    """Made for their texts; saved weights show for which."""
    encoder, micro = (made(name) for name in MODELS)
    assert isinstance(encoder, TextEncoder)
    for network in (encoder, shown(encoder, "encoder")):
        assert (network.words.num_embeddings, network.positions.num_embeddings) == (30, 9)
    assert isinstance(micro, TextTransformer)
    for network in (micro, shown(micro, "distilbert-micro")):
        assert (network.network.config.vocab_size, network.network.config.dim) == (30, 64)
    for name, marked in (("encoder", False), ("distilbert-micro", True), ("distilbert", True)):
        expected = vocabulary_of_rows(marked=marked).identity
        assert tokenizer_source(name, pretrained=False).identity == expected
        if name in MODELS:
            assert tokenizer_source(name, pretrained=True).identity == expected
    published = tokenizer_source("distilbert", pretrained=True)
    assert published.identity == "hub distilbert/distilbert-base-uncased"


def test_parameters_of_distilbert() -> None:
    """Rows that fill less of its vocabulary leave the rest unused: the model stays as published."""
    with torch.device("meta"):
        network = made("distilbert")
    assert sum(p.numel() for p in network.parameters()) == 66_956_548


def test_dropout_of_the_encoder() -> None:
    texts = torch.arange(40).view(8, 5) % 30
    for dropout, same in ((0.0, True), (0.3, False), ("auto", False)):
        network = made("encoder", dropout=dropout)
        assert torch.equal(network(texts), network(texts)) == same


def test_folders(tmp_path: Path) -> None:
    """Their architecture, without their weights; equal tokenizers are the same."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        save_text_model(folder)
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    network = made(str(one))
    assert network.network.config.vocab_size == VOCABULARY
    identity = tokenizer_source(str(one), pretrained=True).identity
    assert tokenizer_source(str(other), pretrained=False).identity == identity
    settings = json.loads((other / "tokenizer.json").read_text())
    settings["normalizer"]["lowercase"] = False
    (other / "tokenizer.json").write_text(json.dumps(settings))
    assert tokenizer_source(str(other), pretrained=False).identity != identity
    with pytest.raises(UsageError, match="its tokenizer has 41 tokens, but its model 40"):
        made(str(one), vocabulary=41)


def test_refused_models() -> None:
    assert refusal(model_maker, "distilbert", max_tokens=513) == (
        "max-tokens = 513: model = 'distilbert' supports at most 512; set max-tokens = 512"
    )
    model_maker("distilbert", max_tokens=512)
    assert "is not known; did you mean distilbert" in refusal(model_maker, "distilbort")
    assert "or a Hugging Face folder" in refusal(model_maker, "./somewhere")


# tasks and runs


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(make_texts(tmp_path / "own", names=CLASS_NAMES))


def test_options_reach_data_and_model(folder: str) -> None:
    make_texts(Path(folder), [*TRAIN, (None, 1)], names=CLASS_NAMES)
    assert "skip-bad = true skips such rows" in refusal(load_task, "ag-news", folder, "encoder")
    options: dict[str, Any] = {"skip_bad": True, "max_samples": 5, "max_tokens": 8}
    task = load_task("ag-news", folder, "encoder", dropout=0.35, **options)
    assert task.num_train == 5
    check_task(task)
    assert (task.train[0].dtype, task.evaluation_batch_size) == (np.int32, 128)
    assert task.train[0].shape[1] <= 8
    assert 0.35 in {m.p for m in task.model().modules() if isinstance(m, torch.nn.Dropout)}
    assert refusal(load_task, "ag-news", folder, split="paper").startswith("split = 'paper'")


@pytest.mark.parametrize("of_the_hub", [False, True])
def test_encoder_with_weights(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_the_hub: bool
) -> None:
    """In a folder, or by its name on the hub."""
    saved = save_text_model(tmp_path / "bert")
    monkeypatch.setattr(pretrained, "_downloaded", lambda *_: tmp_path / "bert")
    model = "owner/bert" if of_the_hub else str(tmp_path / "bert")
    identity = tokenizer_source(model, pretrained=False).identity
    assert (identity == "hub owner/bert") == of_the_hub
    task = load_task("ag-news", folder, model)
    check_task(task)
    assert tokenizer_of(task) != tokenizer_of(load_task("ag-news", folder, "distilbert-micro"))
    found, fresh = task.initial_model(3).state_dict(), task.fresh_model(3).state_dict()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(found[f"network.{name}"], tensor)
    assert any(not torch.equal(tensor, found[name]) for name, tensor in fresh.items())
    assert load_task("ag-news", folder, model, pretrained=False).pretrained is None


@pytest.mark.parametrize("pretrained", [True, False])
def test_weights_are_looked_for_before_data_are_prepared(tmp_path: Path, pretrained: bool) -> None:
    save_text_model(tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").unlink()
    config = RunConfig(
        task="ag-news",
        data=str(tmp_path / "none"),
        model=str(tmp_path / "bert"),
        pretrained=pretrained,
    )
    message = "the folder has no weights" if pretrained else "none' is not a folder"
    assert message in refusal(train_on, InProcessGrid({}), config)


def tokenizer_of(task: Task) -> bytes:
    return task.assets["tokenizer.json"].read_bytes()


def test_a_run_is_loaded_without_its_data_and_evaluated_with_no_other(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other data of equally many words and equally long texts: only the tokenizer differs."""
    model, out = "distilbert-micro", tmp_path / "run"
    task = load_task("ag-news", folder, model)
    run = RunFolder.new(str(out), "")
    config = RunConfig(task="ag-news", data=folder, model=model, out=str(out))
    run.write_config(config.to_run_config())
    run.add_assets(task.assets)
    saved = task.fresh_model(0).state_dict()
    save_file(saved, out / "model.safetensors")
    accuracy = evaluate_run(out, device="cpu").accuracy
    Path(folder).rename(tmp_path / "moved")
    loaded = load(out).state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert evaluate_run(out, data=str(tmp_path / "moved"), device="cpu").accuracy == accuracy
    rows = [(text.replace("the", "zebra"), label) for text, label in TRAIN]
    other = str(make_texts(tmp_path / "other", rows, names=CLASS_NAMES))
    theirs = load_task("ag-news", other, model)
    assert theirs.train[0].shape == task.train[0].shape
    assert tokenizer_of(theirs) != tokenizer_of(task)
    capsys.readouterr()
    assert cli.main(["evaluate", str(out), "--data", other]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    for part in (f"data = {other!r}", "tokenizer.json", "evaluate with the data of the run"):
        assert part in line


# own texts


ROWS = [("A good film", "good"), ("A bad film", "bad"), ("So good", "good"), ("a film", "mixed")]


def write_csv(
    folder: Path, test: list[tuple[str, Any]], columns: str = "text,label", train: Any = ROWS
) -> str:
    folder.mkdir(exist_ok=True)
    for split, rows in (("train", train), ("test", test)):
        lines = [f"{text},{label}" for text, label in rows]
        (folder / f"{split}.csv").write_text("\n".join([columns, *lines]) + "\n")
    return str(folder)


def test_labels_that_are_words_are_numbered_by_name(tmp_path: Path) -> None:
    own = write_csv(tmp_path / "csv", [("Good", "mixed"), ("bad", "bad")], "content,labels")
    for model in MODELS:
        task = load_task("text", own, model)
        check_task(task)
        assert (task.train[1].tolist(), task.test[1].tolist()) == ([1, 0, 1, 2], [2, 0])
        network = task.model()
        assert network(torch.from_numpy(task.train[0].copy())).shape == (4, 3)
        again = load_saved_model("text", model, network.state_dict())
        again.load_state_dict(network.state_dict())


def test_one_file_is_divided_by_validation_share(tmp_path: Path) -> None:
    file = Path(write_csv(tmp_path / "csv", []), "train.csv").rename(tmp_path / "own.csv")
    task = load_task("text", str(file), "encoder", validation_share=0.25)
    assert (task.num_train, task.num_test) == (3, 1)


def test_texts_that_cannot_be_used(tmp_path: Path) -> None:
    def message(test: list[tuple[str, Any]]) -> str:
        return refusal(load_task, "text", write_csv(tmp_path / "csv", test), "encoder")

    assert "test has classes that train does not have: 1;" in message([("x", 1)])
    assert not list(tmp_path.rglob("*.npy"))
    assert "task = 'text' needs data" in refusal(load_task, "text", "", "encoder")
    known = "did you mean encoder?, an encoder OWNER/NAME of the HF hub, or a Hugging Face folder"
    assert refusal(load_task, "text", "", "encodr").endswith(known)


def test_data_of_other_classes_than_the_model(tmp_path: Path) -> None:
    own, out = write_csv(tmp_path / "csv", [("Good", "good")]), tmp_path / "run"
    task = load_task("text", own, "encoder")
    config = RunConfig(task="text", data=own, model="encoder", out=str(out))
    RunFolder.new(str(out), "").write_config(config.to_run_config())
    save_file(task.fresh_model(0).state_dict(), out / "model.safetensors")
    assert evaluate_run(out, device="cpu").num_examples == 1
    for name, rows in (("more", [*ROWS, ("a film", "worse")]), ("fewer", ROWS[:2])):
        other = write_csv(tmp_path / name, [("Good", "good")], train=rows)
        assert refusal(evaluate_run, out, data=other, device="cpu") == (
            f"data = {other!r} has {len({label for _, label in rows})} classes, but the model of "
            f"{out} has 3; evaluate with the classes of the run"
        )
