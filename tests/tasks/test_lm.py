"""Language models on text files, whole or with an adapter, from tiny models in real formats."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flower_blsgd import evaluate_run, load, train
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.errors import UsageError
from flower_blsgd.models.pretrained import import_transformers, quiet
from flower_blsgd.tasks import load_task
from flower_blsgd.tasks.by_name import load_saved_model, prepare_task
from flower_blsgd.tasks.check import check_task
from flower_blsgd.worker.model_io import frozen_tensors, sent_tensors, state_record

from ..models.hf_folders import TEXTS, vocabulary_of_rows

LENGTH = 16
CORE = usable_cores()[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a tiny GPT-2 with its tokenizer."""
    transformers = import_transformers("test")
    path = tmp_path / "gpt2"
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, eos_token_id=1
    )
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(3)
        transformers.GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(path)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=vocabulary_of_rows().make(TEXTS), pad_token="[PAD]", unk_token="[UNK]"
        ).save_pretrained(path)
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts"
    path.mkdir()
    (path / "train.txt").write_text("\n".join(TEXTS * 60))
    (path / "test.txt").write_text("\n".join(TEXTS * 12))
    return path


def test_texts_become_blocks_of_tokens(folder: Path, texts: Path) -> None:
    task = load_task("lm", str(texts), str(folder), max_tokens=LENGTH)
    tokens, targets = task.train
    assert tokens is targets
    assert tokens.shape[1] == LENGTH
    tokenizer = vocabulary_of_rows().make(TEXTS)
    whole = [*tokenizer.encode((texts / "train.txt").read_text()).ids, 1]
    assert np.concatenate(tokens).tolist() == whole[: tokens.size]
    assert len(whole) - tokens.size < LENGTH
    check_task(task, "lm")
    line = prepare_task("lm", str(texts), str(folder), max_tokens=LENGTH)
    assert f"{len(tokens):,} training and {task.num_test:,} test blocks of tokens, ready" in line


def test_max_samples_counts_blocks(folder: Path, texts: Path) -> None:
    task = load_task("lm", str(texts), str(folder), max_tokens=LENGTH, max_samples=2)
    assert (len(task.train[0]), task.num_test) == (2, 2)


def test_model_with_several_end_tokens_begins_a_text_after_the_first(
    folder: Path, texts: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, 2]}))
    task = load_task("lm", str(texts), str(folder), max_tokens=LENGTH, pretrained=False)
    whole = vocabulary_of_rows().make(TEXTS).encode((texts / "test.txt").read_text()).ids
    assert np.concatenate(task.test[0]).tolist() == [*whole, 1][: task.test[0].size]


def test_rows_of_a_table_end_with_the_models_mark(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": text, "label": 0} for text in (*TEXTS, 12)]  # also a number is a text
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task("lm", str(file), str(folder), max_tokens=8, validation_share=0.3)
    first = vocabulary_of_rows().make(TEXTS).encode(TEXTS[0]).ids
    whole = np.concatenate(task.train.dataset[0])
    assert whole[: len(first) + 1].tolist() == [*first, 1]


def test_adapter_alone_is_sent_in_float32(folder: Path, texts: Path) -> None:
    adapted = load_task("lm", str(texts), str(folder), max_tokens=LENGTH, lora_rank=2)
    model = adapted.replica(0)
    assert all("lora_" in name for name in sent_tensors(model))
    assert {array.dtype for array in state_record(model).values()} == {"float32"}
    frozen = frozen_tensors(model)
    assert frozen
    for name, tensor in frozen_tensors(adapted.replica(1)).items():
        assert torch.equal(tensor, frozen[name])
    whole = load_task("lm", str(texts), str(folder), max_tokens=LENGTH).replica(0)
    names = list(sent_tensors(whole))
    assert "network.transformer.wte.weight" in names
    assert "network.lm_head.weight" not in names  # tied to it
    again = load_saved_model("lm", str(folder), whole.state_dict())
    again.load_state_dict(whole.state_dict())


@pytest.mark.processes
def test_run_trains_evaluates_saves_loads_and_resumes(
    folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {
        **{"data": texts, "model": folder, "max_tokens": LENGTH, "lora_rank": 8},
        **{"optimizer": "adamw", "learning_rate": 0.01, "batch_size": 4, "threads": 1},
        **{"local_steps_fast": 2, "local_steps_slow": 1, "quiet": True, "out": "run"},
        "workers": f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow",
    }
    first = train("lm", epochs=1, **settings)
    result = train(resume="run", epochs=2, quiet=True)
    assert result.summary["metric"] < first.summary["metric"] < 40.0  # that of guessing
    assert result.summary["metric_name"] == "perplexity"
    assert result.summary["best_metric"] == result.summary["metric"]
    assert evaluate_run("run").metric == pytest.approx(result.summary["metric"], rel=1e-3)
    assert all("lora_" in name for name in load_file("run/model.safetensors"))
    load("run").network.save_pretrained("adapter")  # type: ignore[operator]
    assert Path("adapter/adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model": ""}, "model is empty, but task = 'lm' needs a causal language model"),
        ({"max_tokens": 64}, "max-tokens = 64: model = "),
        ({"lora_rank": 2, "pretrained": False}, "lora-rank = 2 needs published weights"),
        ({"data": "empty.txt"}, "train has 1 tokens, but a block has 16; use more text"),
        ({"data": "train.txt"}, "no test split; add one, or set validation-share"),
    ],
)
def test_what_cannot_work_is_refused(
    folder: Path,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    told: str,
) -> None:
    monkeypatch.chdir(texts)
    (texts.parent / "empty.txt").write_text(" ")
    given = {"data": str(texts), "model": str(folder), "max_tokens": LENGTH, **settings}
    if given["data"] == "empty.txt":
        given["data"] = str(texts.parent / "empty.txt")
    with pytest.raises(UsageError) as refused:
        load_task("lm", given.pop("data"), given.pop("model"), **given).model()
    assert told in str(refused.value)


def test_perplexity_is_that_of_the_mean_loss(folder: Path, texts: Path) -> None:
    task = load_task("lm", str(texts), str(folder), max_tokens=LENGTH)
    report = task.evaluate(task.replica(0), "cpu", 0, task.num_test, 4)
    assert task.figure(report) == pytest.approx(math.exp(report.loss))


def test_peft_is_named_if_it_is_missing(
    folder: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load_task("lm", str(texts), str(folder), max_tokens=LENGTH, lora_rank=2)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "peft" else find(name)
    )
    with pytest.raises(UsageError, match=r"lora-rank = 2 needs peft; .*lora"):
        task.model()
