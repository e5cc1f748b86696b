"""AG News's task on small data of its layout, trained, saved and taken up again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from safetensors.torch import save_file

from flower_blsgd import Task, cli, evaluate_run, load
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.models.text_encoder import TextEncoder
from flower_blsgd.results.folder import RunFolder
from flower_blsgd.run import train_on
from flower_blsgd.tasks import load_task
from flower_blsgd.tasks.ag_news import ag_news, prepare
from flower_blsgd.tasks.check import check_task
from flower_blsgd.worker.batches import batch_source

from ..data.text_files import CLASS_NAMES, TRAIN, make_texts
from ..in_process_grid import InProcessGrid
from ..models.text_folders import save_folder

MODELS = ("encoder", "distilbert-micro")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))
    return str(make_texts(tmp_path / "own", names=CLASS_NAMES))


@pytest.mark.parametrize("model", MODELS)
def test_task_is_sound(model: str, folder: str) -> None:
    task = ag_news(folder, model)
    assert (task.num_train, task.num_test) == (6, 3)
    assert task.evaluation_batch_size == 128
    assert task.pretrained is None
    check_task(task)
    inputs, targets = batch_source(task.train, torch.device("cpu")).batch(torch.tensor([4, 1]))
    assert inputs.dtype == torch.int32
    assert targets.tolist() == [0, 1]


def test_options_reach_data_and_model(folder: str) -> None:
    rows = [*TRAIN, (None, 1)]
    make_texts(Path(folder), rows, names=CLASS_NAMES)
    with pytest.raises(UsageError, match="row 6 of train has no text; skip-bad = true"):
        load_task("ag-news", folder, "encoder")
    options: dict[str, Any] = {"skip_bad": True, "max_samples": 5, "max_tokens": 8}
    task = load_task("ag-news", folder, "encoder", dropout=0.35, **options)
    assert task.num_train == 5
    assert 0.35 in {m.p for m in task.model().modules() if isinstance(m, torch.nn.Dropout)}
    with pytest.raises(UsageError, match="split = 'paper'"):
        load_task("ag-news", folder, "encoder", split="paper")


def test_prepare_makes_what_the_task_takes(folder: str) -> None:
    texts = prepare(folder, "encoder", max_tokens=9)
    task = ag_news(folder, "encoder", max_tokens=9, dropout=0.2)
    assert task.fingerprint() == texts.fingerprint
    assert np.array_equal(task.train[0], texts.train[0])


def test_own_folder_with_weights(folder: str, tmp_path: Path) -> None:
    saved = save_folder(tmp_path / "bert")
    task = ag_news(folder, str(tmp_path / "bert"))
    check_task(task)
    model = task.initial_model(3)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(model.state_dict()[f"network.{name}"], tensor)
    with torch.inference_mode():
        assert model.eval()(torch.from_numpy(np.array(task.test[0]))).shape == (3, 4)


def test_workers_need_no_weights(folder: str, tmp_path: Path) -> None:
    """They get them from the server."""
    save_folder(tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").unlink()
    task = ag_news(folder, str(tmp_path / "bert"))
    task.fresh_model(0)
    with pytest.raises(UsageError, match="the folder has no weights"):
        task.initial_model(0)


def test_weights_are_looked_for_before_data_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the data is would be told only after it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    save_folder(tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").unlink()
    settings: dict[str, Any] = {"task": "ag-news", "data": str(tmp_path / "none")}
    for model, told in (
        ("", "distilbert/distilbert-base-uncased is out of reach"),
        (str(tmp_path / "bert"), "the folder has no weights"),
        ("encoder", "none' does not exist"),
        ("distilbort", "is not known"),
    ):
        with pytest.raises(UsageError, match=told):
            train_on(InProcessGrid({}), RunConfig(model=model, **settings))
    for model in ("", str(tmp_path / "bert")):
        with pytest.raises(UsageError, match="none' does not exist"):
            train_on(InProcessGrid({}), RunConfig(model=model, pretrained=False, **settings))


def test_hub_out_of_reach(folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UsageError, match=r"model=<folder> .* or set pretrained = false") as refused:
        ag_news(folder)
    assert "distilbert/distilbert-base-uncased is out of reach" in str(refused.value)


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
def test_a_run_is_taken_up_without_its_data(model: str, folder: str, tmp_path: Path) -> None:
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
    """Equally many words, and equally long texts: only the tokenizer tells."""
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


def test_longer_test_texts_of_equal_words_are_cut(folder: str, tmp_path: Path) -> None:
    leave_run(tmp_path / "run", ag_news(folder, "encoder"), folder, "encoder")
    rows = [("the vote in the capital the rain the phone", 0)]
    other = str(make_texts(tmp_path / "other", test=rows, names=CLASS_NAMES))
    assert evaluate_run(tmp_path / "run", data=other, device="cpu").num_examples == 1


@pytest.mark.processes
@pytest.mark.parametrize("model", [*MODELS, "folder"])
def test_a_run_is_trained_saved_and_taken_up(
    model: str,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if model == "folder":
        save_folder(tmp_path / "folder", "distilbert", head="Model")
    make_texts(Path(folder), TRAIN * 4, names=CLASS_NAMES)
    out = tmp_path / "run"
    settings = {
        "task": "ag-news",
        "data": folder,
        "model": model,
        "batch-size": "4",
        "epochs": "2",
        "local-steps-fast": "2",
        "local-steps-slow": "1",
        "optimizer": "adamw",
        "threads": "1",
        "workers": "1x cpu fast; 1x cpu slow",
        "out": str(out),
    }
    words = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
    root = str(Path(__file__).parents[2])
    assert cli.main(["run", root, *words]) == 0
    loaded = load(out)
    assert isinstance(loaded, TextEncoder) == (model == "encoder")
    result = evaluate_run(out, device="cpu")
    assert result.num_examples == 3
    assert f"accuracy {result.accuracy:.2%}" in capsys.readouterr().out
    assert (out / "tokenizer.json").read_bytes() == tokenizer_of(
        load_task("ag-news", folder, model)
    )
