"""Rounds of the paper's configs: what runs, on which made-up data, and what is noted of it."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import paper_rounds
from benchmarks.made_up_data import make_up
from benchmarks.memory_watch import Peak
from benchmarks.paper_rounds import NARROW, PaperRound
from flower_blsgd.devices.machine import Machine
from flower_blsgd.devices.worker_spec import parse_workers
from flower_blsgd.tasks import load_task

from ..command import Command


@pytest.mark.parametrize(
    ("name", "cards", "workers", "samples"),
    [
        ("cifar10-2c8g", 1, "8x cuda:0 fast; 2x cpu slow", 32 * (8 * 32 + 2)),
        ("ag-news-2c8g", 9, "8x cuda:0-7 fast; 2x cpu slow", 32 * (8 * 32 + 2)),
        ("tiny-imagenet-1c1g", 0, "1x cpu fast; 1x cpu slow", 128 * (32 + 16)),
    ],
)
def test_workers_are_put_on_the_cards_that_are_there(
    name: str, cards: int, workers: str, samples: int
) -> None:
    one = PaperRound.of(name, cards)
    assert one.settings["workers"] == workers
    assert one.samples == samples
    there = parse_workers(workers, Machine((0, 1), tuple(f"cuda:{i}" for i in range(cards))))
    assert {w.device for w in there if w.tier == "slow"} == {"cpu"}
    assert len({w.device for w in there if w.tier == "fast"}) == max(1, min(cards, len(there) - 2))


# --- data


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("cifar10-2c8g", (3, 32, 32), 10),
        ("flowers102-2c8g", (3, 224, 224), 102),
        ("tiny-imagenet-2c8g", (3, 64, 64), 200),
        ("ag-news-2c8g", (128,), 4),
    ],
)
def test_task_finds_made_up_data_where_it_would_have_prepared_them(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = PaperRound.of(name, 0, tiny=True, narrow=True)
    make_up(tmp_path, one.config, train=9, test=4)
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path))
    config = one.config
    task = load_task(config.task, config.data, config.model, **config.task_options)
    (inputs, labels), (tested, _) = task.train, task.test  # type: ignore[misc]
    assert inputs.shape == (9, *shape)
    assert tested.shape == (4, *shape)
    assert labels.max() < classes
    with torch.no_grad():
        outputs = task.initial_model(0).eval()(torch.from_numpy(tested))
    assert outputs.shape == (4, classes)
    assert (task.augment is None) == (config.task == "ag-news")
    assert all(path.is_file() for path in task.assets.values())


# --- rows


def a_worker(label: str, seconds: float, steps: int, failure: str = "") -> dict[str, Any]:
    return {
        "label": label,
        "fast": label.startswith("fast"),
        "compute_seconds": seconds,
        "completed_steps": steps,
        "failure": failure,
    }


def a_round(*workers: dict[str, Any]) -> dict[str, Any]:
    return {"planning_seconds": 0.5, "round_seconds": 9.5, "workers": list(workers)}


def test_rows_of_a_round() -> None:
    fast = [a_worker(f"fast-{i} (cuda:0)", seconds, 32) for i, seconds in enumerate((3.2, 6.4))]
    slow = [a_worker("slow-0 (cpu:0-7)", 8.0, 1), a_worker("slow-1 (cpu:8-15)", 4.0, 1)]
    peak = Peak(host_bytes=3_000_000_000, card_bytes=20_500_000_000)
    rows = paper_rounds.rows_of("it", a_round(*fast, *slow), peak)
    assert [(r["name"], pytest.approx(r["value"]), r["unit"]) for r in rows] == [
        ("it: first round, 2 + 2 workers", 10.0, "s"),
        ("it: step of a fast worker (cuda)", 0.15, "s"),
        ("it: step of a slow worker (cpu)", 6.0, "s"),
        ("it: most memory taken on a card", 20.5, "GB"),
        ("it: most host memory of all its processes (PSS)", 3.0, "GB"),
    ]
    assert rows[2]["ratio"] == pytest.approx(40.0)
    assert len(paper_rounds.rows_of("it", a_round(*fast, *slow), Peak())) == 3


@pytest.mark.processes
def test_a_round_really_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, blsgd: Command
) -> None:
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "of-the-user"))
    monkeypatch.chdir(paper_rounds.ROOT)
    monkeypatch.setattr(paper_rounds, "run", lambda words, _: blsgd(*words[3:], warns=True))
    one = PaperRound.of("cifar10-1c1g", 0, tiny=True, narrow=True)
    assert NARROW["cifar10"] in one.title
    rows = paper_rounds.rows_of_run(one, 300.0)
    linux = sys.platform == "linux"
    assert [r["unit"] for r in rows] == ["s", "s", "s", *(["GB"] if linux else [])]
    assert all(r["value"] > 0 for r in rows)
    assert rows[0]["name"].endswith("1 + 1 workers")
    assert list(tmp_path.iterdir()) == []


# --- memory
