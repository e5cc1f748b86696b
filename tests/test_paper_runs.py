"""The paper's configs really train: one round each, narrow models, data in the real formats."""

import json
from pathlib import Path
from typing import Any

import pytest

from .stand_ins import IMAGES, write_image_folders, write_stand_in
from .test_paper_configs import PRINTED, SAMPLES, config_of, task_name
from .test_run import grid_of, train_on

NARROW = {
    "cifar10": "resnet8",
    "cifar100": "wrn-10-1",
    "flowers102": "wrn-10-1",
    "tiny-imagenet": "vit-micro-16",
    "ag-news": "distilbert-micro",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("data")
    return {task: str(write_stand_in(task, root / task)) for task in SAMPLES}


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))


def nodes_of(fast: int, slow: int) -> tuple[dict[str, Any], ...]:
    tiers = ["fast"] * fast + ["slow"] * slow
    return tuple({"tier": tier, "partition-id": place} for place, tier in enumerate(tiers))


@pytest.mark.parametrize("name", [*PRINTED, "flowers102-official"])
def test_one_round(name: str, data: dict[str, str]) -> None:
    task = task_name(name)
    few = name.endswith("1c1g")
    fast, slow = (1, 1) if few else (8, 2)
    config = config_of(
        name,
        data=data[task],
        model=NARROW[task],
        pretrained=task not in ("tiny-imagenet", "ag-news"),
        batch_size=2,
        local_steps_fast=2,
        seconds=1e-6,
        clock="wall",
        threads=1,
        name=name,
    )
    train_on(grid_of(config, nodes_of(fast, slow)), config)
    folder = Path("runs") / f"{name}-1"
    summary = json.loads((folder / "summary.json").read_text())
    (line,) = (folder / "rounds.jsonl").read_text().splitlines()
    steps = [worker["completed_steps"] for worker in json.loads(line)["workers"]]
    slow_steps = 16 if few else 1
    assert steps == [2] * fast + [slow_steps] * slow
    assert summary["failures"] == []
    assert 0 <= summary["accuracy"] <= 1
    assert summary["loss"] > 0


@pytest.mark.parametrize("task", IMAGES)
def test_one_round_from_image_folders(task: str, tmp_path: Path) -> None:
    data = write_image_folders(task, tmp_path / "images")
    changes = {"local_steps_fast": 2, "seconds": 1e-6, "threads": 1, "name": task}
    config = config_of(f"{task}-smoke", data=str(data), batch_size=2, **changes)
    report = train_on(grid_of(config, nodes_of(1, 1)), config)
    splits = 2 if task == "flowers102" else 1  # train and test together
    classes = IMAGES[task][2]
    assert report.summary["rounds"] == 1
    assert report.summary["samples"] == 2 * (2 + 2)
    assert report.summary["failures"] == []
    (meta,) = (tmp_path / "cache").glob("*/meta.json")
    shape = json.loads(meta.read_text())["arrays"]["train_images"]["shape"]
    assert shape[0] == splits * classes


@pytest.mark.parametrize("task", SAMPLES)
def test_smoke_config_trains(task: str, data: dict[str, str]) -> None:
    changes = {"threads": 1, "max_samples": 64, "epochs": 10, "evaluate_every_epochs": 10}
    config = config_of(f"{task}-smoke", data=data[task], name=task, **changes)
    train_on(grid_of(config, nodes_of(1, 1)), config)
    folder = Path("runs") / f"{task}-1"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["epochs"] == config.epochs
    assert summary["samples"] >= 64 * (config.epochs - 1)
    assert summary["failures"] == []
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert rounds[-1]["train_loss"] < rounds[0]["train_loss"]
