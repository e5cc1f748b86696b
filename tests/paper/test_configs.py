"""The configs of the paper's benchmarks: its tables' values, its plans, a round of each."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord

from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import Machine
from flower_blsgd.devices.worker_spec import WorkerSpec, parse_workers
from flower_blsgd.paper.reproductions import printed
from flower_blsgd.parts import make_strategy
from flower_blsgd.protocol import WorkerProfile
from flower_blsgd.strategy.workers import WorkerRegistry

from ..stand_ins import write_stand_in
from ..test_run import grid_of, train_on

CONFIGS = Path(__file__).parents[2] / "configs"

PRINTED = {f"{row['dataset']}-{row['setting']}": row for row in printed("hyperparameters")}
MODELS = {
    "cifar10": "resnet20",
    "cifar100": "wrn-28-10",
    "flowers102": "wrn-16-8",
    "tiny-imagenet": "vit_b_16",
    "ag-news": "distilbert",
}

SAMPLES = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "flowers102": 7_169,
    "tiny-imagenet": 100_000,
    "ag-news": 120_000,
}

# comparison_2c8g.csv: communications per epoch.
SYNC, FAST, LOCAL = "sync-sgd", "sync-sgd-fast-only", "biased-local-sgd"
COMMUNICATIONS = {
    "cifar10-2c8g": {SYNC: 128, FAST: 160, LOCAL: 4, "byteps": 160, "dlb": 128},
    "flowers102-2c8g": {SYNC: 64, FAST: 80, LOCAL: 2, "byteps": 80, "dlb": 64},
    "cifar100-2c8g": {SYNC: 128, FAST: 160, LOCAL: 4, "byteps": 160, "dlb": 128},
}


def config_of(name: str, /, **changes: Any) -> RunConfig:
    text = (CONFIGS / f"{name}.toml").read_text()
    return replace(RunConfig.from_run_config(tomllib.loads(text)), **changes)


def workers_of(config: RunConfig) -> list[WorkerSpec]:
    found = parse_workers(config.workers, Machine((0, 1), ()), anywhere=True)
    return [replace(w, seconds_per_step=0.01 if w.tier == "fast" else 0.02) for w in found]


def plan_of(config: RunConfig, num_samples: int, epoch: int = 1) -> Any:
    workers = workers_of(config)
    strategy = make_strategy(config, num_samples, len(workers))
    profiles = [WorkerProfile.of(worker, place) for place, worker in enumerate(workers)]
    workers = WorkerRegistry.of_profiles(profiles).workers
    strategy.planner.check(workers)
    strategy.planner.next_round(epoch, workers, ArrayRecord())
    return strategy.planner.plan


def task_name(name: str) -> str:
    return name.rpartition("-")[0]


def workers_in(name: str) -> tuple[int, int]:
    """Return how many fast and slow workers a setting has."""
    return (1, 1) if name.endswith("1c1g") else (8, 2)


def slow_steps(name: str) -> int:
    return 16 if name.endswith("1c1g") else 1


@pytest.mark.parametrize("name", PRINTED)
def test_config_has_what_the_paper_prints(name: str) -> None:
    row, config = PRINTED[name], config_of(name)
    assert (config.task, config.model) == (row["dataset"], MODELS[row["dataset"]])
    for key in ("batch_size", "epochs", "learning_rate", "weight_decay"):
        assert getattr(config, key) == float(row[key])
    assert (config.optimizer, config.momentum, config.nesterov) == ("sgd", 0.9, False)
    assert (config.algorithm, config.choices.epoch, config.clock) == (LOCAL, "samples", "device")
    falls = [
        float(share.strip(" %")) / 100 * config.epochs for share in config.decay_epochs.split(",")
    ]
    assert falls == pytest.approx([float(epoch) for epoch in row["decay_epochs"].split(";")])
    assert (config.local_steps_fast, config.local_steps_slow) == (32, slow_steps(name))
    assert config.pretrained
    assert config.split == ("paper" if config.task == "flowers102" else "")
    fast, slow = workers_in(name)
    devices = [(worker.device, worker.tier) for worker in workers_of(config)]
    assert devices == [(f"cuda:{i}", "fast") for i in range(fast)] + [("cpu", "slow")] * slow


@pytest.mark.parametrize("name", COMMUNICATIONS)
@pytest.mark.parametrize("algorithm", [SYNC, FAST, LOCAL, "byteps", "dlb", "balanced-local-sgd"])
def test_rounds_of_the_paper_s_table(name: str, algorithm: str) -> None:
    config = config_of(name, epoch="table", algorithm=algorithm)
    printed = {**COMMUNICATIONS[name], "balanced-local-sgd": COMMUNICATIONS[name][LOCAL]}
    assert plan_of(config, SAMPLES[config.task]).rounds == printed[algorithm]


# a round of each, with narrow models and data in the real formats

NARROW = {
    "cifar10": "resnet8",
    "cifar100": "wrn-10-1",
    "flowers102": "wrn-10-1",
    "tiny-imagenet": "vit-micro-16",
    "ag-news": "distilbert-micro",
}
"""Models that train in seconds."""


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


@pytest.mark.parametrize("name", ["cifar10-2c8g", "ag-news-1c1g", "flowers102-official"])
def test_one_round(name: str, data: dict[str, str]) -> None:
    task = task_name(name)
    fast, slow = workers_in(name)
    config = config_of(
        name,
        data=data[task],
        model=NARROW[task],
        pretrained=task not in ("tiny-imagenet", "ag-news"),
        batch_size=2,
        local_steps_fast=2,
        local_steps_slow=slow_steps(name),
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
    assert steps == [2] * fast + [slow_steps(name)] * slow
    assert summary["failures"] == []
    assert 0 <= summary["accuracy"] <= 1
    assert summary["loss"] > 0


@pytest.mark.parametrize("task", SAMPLES)
def test_smoke_config_is_small_and_trains(task: str, data: dict[str, str]) -> None:
    smoke, paper = config_of(f"{task}-smoke"), config_of(f"{task}-2c8g")
    assert (smoke.task, smoke.max_samples, smoke.split) == (task, 512, paper.split)
    assert smoke.model.partition("-")[0][:3] == paper.model[:3]
    assert {worker.device for worker in workers_of(smoke)} == {"cpu"}
    changes = {"threads": 1, "max_samples": 64, "epochs": 6, "evaluate_every_epochs": 6}
    changes["local_steps_slow"] = 2  # so that nothing is measured
    config = config_of(f"{task}-smoke", data=data[task], name=task, **changes)
    train_on(grid_of(config, nodes_of(1, 1)), config)
    folder = Path("runs") / f"{task}-1"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["epochs"] == config.epochs
    assert summary["samples"] >= 64 * (config.epochs - 1)
    assert summary["failures"] == []
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert rounds[-1]["train_loss"] < rounds[0]["train_loss"]
