"""Limits of a run."""

import pytest

from flower_blsgd.strategy.budget import NO_LIMIT, Budget


def test_nearest_limit_gives_the_share() -> None:
    budget = Budget(epochs=4, seconds=100.0, samples=1000)
    assert budget.share(Budget(1.5, 30.0, 7, 300)) == 0.375
    assert budget.share(Budget(1.5, 90.0, 7, 300)) == 0.9
    assert Budget(rounds=10).share(Budget(1.5, 90.0, 7, 300)) == 0.7


@pytest.mark.parametrize(
    ("limits", "ended", "shown"),
    [
        ({"epochs": 3}, True, "3 of 3 epochs done"),
        ({"epochs": 3}, False, ""),
        ({"epochs": 4}, True, ""),
        ({"seconds": 40.0}, False, "40.5 of 40 seconds of training done"),
        ({"rounds": 12}, False, "12 of 12 rounds done"),
        ({"samples": 2000, "epochs": 9}, False, "2,048 of 2,000 samples done"),
    ],
)
def test_limit_that_is_reached(limits: dict[str, float], ended: bool, shown: str) -> None:
    assert Budget(**limits).used_up(Budget(3, 40.5, 12, 2048), ended) == shown


def test_limits_in_words() -> None:
    assert str(Budget(NO_LIMIT, samples=5000)) == "5,000 samples"
    assert str(Budget(15)) == "15 epochs"
    assert str(Budget(1, 2.5)) == "2.5 seconds of training, or 1 epoch"
    assert Budget.of(epochs=None, rounds=3) == Budget(rounds=3)
