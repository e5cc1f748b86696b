"""Epochs scaled to equal samples, who can serve as a rank, and the rows of whole runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ddp, epoch, summaries
from benchmarks.copying import copy_seconds
from benchmarks.images import data_text, found_images, some_images
from flower_blsgd.runtime.devices import parse_workers
from flower_blsgd.runtime.machine import Machine


def a_round(number: int, seconds: float, samples: list[int]) -> dict[str, Any]:
    return {
        "epoch": number,
        "planning_seconds": 0.5,
        "round_seconds": seconds - 0.5,
        "workers": [{"num_examples": count} for count in samples],
    }


def test_epochs_are_scaled_to_the_same_samples() -> None:
    rounds = [
        a_round(1, 50.0, [100, 20]),  # left out: processes start
        a_round(2, 3.0, [100, 20]),
        a_round(2, 3.0, [100, 20]),
        a_round(3, 2.0, [50, 10]),
    ]
    # 6 s for 240 samples and 2 s for 60, each for 480
    assert epoch.scaled_epochs(rounds, 480) == pytest.approx([12.0, 16.0])


def test_rows_are_multiples_of_biased_local_sgd() -> None:
    seconds = {"biased-local-sgd": [2.0], "sync-sgd": [6.0], "gloo": [8.0]}
    competitors = ["biased-local-sgd", "sync-sgd", "gloo", "nccl"]
    rows = epoch.rows_of(competitors, seconds, {"nccl": "two ranks on one"}, 4096)
    assert [r["ratio"] for r in rows] == [1.0, 3.0, 4.0, None]
    assert rows[2]["name"] == "DistributedDataParallel (gloo), 4,096 images"
    assert rows[3]["reason"] == "two ranks on one"


@pytest.mark.parametrize(
    ("machine", "workers"),
    [
        (Machine((0, 1, 2), ()), "1x cpu:0 fast; 1x cpu:1 slow slowdown=8"),
        (Machine((3,), ()), "1x cpu:3 fast; 1x cpu:3 slow slowdown=8"),
        (Machine((0, 1), ("cuda:0",)), "1x cuda:0 fast; 1x cuda:0 slow slowdown=8"),
        (Machine((0,), ("cuda:0", "cuda:1")), "1x cuda:0 fast; 1x cuda:1 slow slowdown=8"),
    ],
)
def test_default_workers(machine: Machine, workers: str) -> None:
    assert epoch.default_workers(machine) == workers
    fast, slow = parse_workers(workers, machine)
    assert (fast.slowdown, slow.slowdown) == (1.0, 8.0)


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ("1x cuda:0 fast; 1x cuda:1 slow", None),
        ("1x cuda:0 fast; 1x cuda:0 slow", "two ranks on one GPU"),
        ("1x cuda:0 fast; 1x cpu slow", "a GPU for every rank"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(workers: str, reason: str | None) -> None:
    specs = parse_workers(workers, Machine((0,), ("cuda:0", "cuda:1")))
    found = ddp.why_not("nccl", specs)
    assert (found is None) == (reason is None)
    assert found is None or reason is None or reason in found
    assert ddp.why_not("gloo", specs) is None


class FakeTime:
    """A clock that only sleep moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_pace_makes_a_step_as_many_times_as_long_as_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeTime()
    monkeypatch.setattr(ddp, "time", clock)
    pace = ddp.Pace(4.0)
    took = []
    for computing in (2.0, 3.0, 1.0, 9.0):
        began = clock.now
        pace.begin()
        clock.sleep(computing)
        pace.sleep()
        took.append(clock.now - began)
    # four times the best so far: 2, 2, 1, 1; the last step alone took longer than 4 x 1
    assert took == [8.0, 8.0, 4.0, 9.0]


def test_options_of_a_wrong_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--epochs", "1"], "at least 2"),
        (["--workers", "3x cpu"], "a fast and a slowed worker"),
    ):
        with pytest.raises(SystemExit) as stopped:
            epoch.options(words)
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err


# --- images


def test_made_up_images_are_the_same_each_time() -> None:
    first, again = (some_images("64", "resnet8") for _ in range(2))
    assert first.num_train == 64
    assert first.train[0].shape == (64, 3, 32, 32)
    assert first.fingerprint() == again.fingerprint()


def test_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no such folder"):
        found_images(tmp_path / "none")
    assert found_images(tmp_path) == tmp_path
    assert data_text(128, tmp_path) == f"128@{tmp_path}"
    assert data_text(128, None) == "128"


# --- copying


def test_copying_takes_longer_for_more_bytes() -> None:
    few, many = (min(copy_seconds(count, 5)) for count in (1 << 20, 1 << 26))
    assert len(copy_seconds(1000, 3)) == 3
    assert many > 8 * few


# --- summaries


def a_summary(**changed: Any) -> dict[str, Any]:
    fast = {"device": "cuda:0", "tier": "fast"}
    slow = {"device": "cpu", "tier": "slow"}
    usual = {
        "training_seconds": 100.0,
        "device_seconds": None,
        "accuracy": 0.9,
        "epochs": 100,
        "samples": 4_999_000,
        "workers": [fast, fast, slow],
        "seed": 0,
        "versions": {"torch": "2"},
    }
    return {**usual, **changed}


def test_one_whole_training_on_one_gpu_counts_against_the_goal() -> None:
    rows = summaries.rows_of([a_summary()], at_once=1)
    assert (rows[0]["value"], rows[0]["goal"], rows[0]["goal_met"]) == (100.0, "<= 120 s", True)
    assert [r["name"] for r in rows[1:]] == [
        "accuracy (alone on its device)",
        "epochs (alone on its device)",
    ]


@pytest.mark.parametrize(
    ("at_once", "changed"),
    [
        (2, {}),
        (1, {"interrupted": True}),
        (1, {"epochs": 99}),
        (1, {"samples": 4_000_000}),
        (1, {"workers": [{"device": "cpu", "tier": "fast"}]}),
        (1, {"workers": [{"device": f"cuda:{i}", "tier": "fast"} for i in range(2)]}),
    ],
)
def test_no_other_training_counts(at_once: int, changed: dict[str, Any]) -> None:
    rows = summaries.rows_of([a_summary(**changed)] * at_once, at_once)
    assert rows[0]["value"] == 100.0
    assert not any("goal" in r for r in rows)


def test_conditions_of_runs_name_what_is_not_the_default(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(a_summary()))
    (tmp_path / "config.toml").write_text('task = "digits"\nepochs = 99\ndata = "/here"\n')
    _, taken_under = summaries.measure([tmp_path], at_once=1)
    assert taken_under["settings"] == {"epochs": 99}
    assert taken_under["seeds"] == [0]
    assert taken_under["interrupted"] == [False]
