"""The table of `benchmarks.own_loop_speedup`, from made-up accuracies."""

import math

import pytest

from benchmarks.own_loop_speedup import ALONE, LAUNCHED, RUN, runs, table

SOONER = {ALONE: 1.0, LAUNCHED: 1.3, RUN: 1.2}


def accuracy(arm: str, seed: int, seconds: float) -> float:
    """Return an accuracy that grows with the log of the time, of which `SOONER` is a multiple."""
    return 0.5 + 0.1 * math.log(SOONER[arm] * seconds) + 0.01 * seed


def test_times_sooner_are_recovered() -> None:
    done = list(runs(10.0, 2))
    assert len(set(done)) == len(done) == 2 * 7
    rows = [
        {"arm": arm, "seed": seed, "seconds": seconds, "accuracy": accuracy(arm, seed, seconds)}
        for arm, seed, seconds in done
    ]
    alone, launched, run, ratio = table(rows, 10.0, 2)
    assert alone["value"] == pytest.approx(accuracy(ALONE, 0, 10.0) + 0.005)
    means = [one["geometric_mean"] for one in (launched, run, ratio)]
    assert means == pytest.approx([1.3, 1.2, 1.3 / 1.2])
    assert not ratio["goal_met"]  # the seeds agree, so the interval is narrow
