"""Epochs scaled to equal samples, who can serve as a rank, and the rows of whole runs."""

from typing import Any

import pytest

from benchmarks import epoch, summaries


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
        (1, {"workers": [{"device": f"cuda:{i}", "tier": "fast"} for i in range(2)]}),
    ],
)
def test_no_other_training_counts(at_once: int, changed: dict[str, Any]) -> None:
    rows = summaries.rows_of([a_summary(**changed)] * at_once, at_once)
    assert rows[0]["value"] == 100.0
    assert not any("goal" in r for r in rows)
