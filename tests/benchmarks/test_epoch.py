"""Epochs scaled to equal samples."""

from typing import Any

import pytest

from benchmarks import epoch


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
