"""AG News's task on small data of its layout, trained, saved and taken up again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from flower_blsgd import cli, evaluate_run, load
from flower_blsgd.errors import UsageError
from flower_blsgd.models.text_encoder import TextEncoder
from flower_blsgd.tasks import load_task
from flower_blsgd.tasks.ag_news import ag_news, prepare
from flower_blsgd.tasks.check import check_task
from flower_blsgd.worker.batches import batch_source

from ..data.text_files import CLASS_NAMES, TRAIN, make_texts
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


def test_hub_out_of_reach(folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UsageError, match=r"model=<folder> .* or set pretrained = false") as refused:
        ag_news(folder)
    assert "distilbert/distilbert-base-uncased is out of reach" in str(refused.value)


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
