"""The sums over a run's rounds."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.local_steps import Clock
from flower_blsgd.results.accounts import Accounts, WorkerTotal
from flower_blsgd.round_log import RoundRecord

from .records import record, row, two_rounds


def accounts_of(
    *records: RoundRecord, clock: Clock = "wall", speeds: Mapping[int, float] | None = None
) -> Accounts:
    accounts = Accounts(clock, speeds or {})
    for one in records:
        accounts.add(one)
    return accounts


def test_accounts_hand_worked() -> None:
    accounts = accounts_of(*two_rounds())
    assert accounts.rounds == 2
    assert accounts.samples == 64 + 64 + 16 + 64 + 0 + 32
    assert accounts.wall.round_seconds == 16.0
    assert accounts.planning_seconds == 0.75
    assert accounts.training_seconds == 16.75
    assert accounts.workers == {
        0: WorkerTotal("fast-0 (cpu:0)", True, 4, 16, 8, 128, 2, 0, 1.25, 11.0, 3.0, 2.0),
        1: WorkerTotal("fast-1 (cpu:1)", True, 4, 16, 4, 64, 2, 1, 0.25, 4.0, 5.0, 1.0),
        2: WorkerTotal("slow-2 (cpu:2)", False, 2, 16, 3, 48, 2, 0, 0.5, 13.0, 1.0, 2.0),
    }


def test_seconds_per_step() -> None:
    workers = accounts_of(*two_rounds()).workers
    assert workers[0].seconds_per_step == 11.0 / 8
    assert workers[2].seconds_per_step == 13.0 / 3
    assert WorkerTotal("idle", True).seconds_per_step is None


def test_waiting_share_hand_worked() -> None:
    """Waiting of the tier / (its workers x sum of round_seconds)."""
    accounts = accounts_of(*two_rounds())
    assert accounts.waiting_share(fast=True) == (3.0 + 5.0) / (2 * 16.0)
    assert accounts.waiting_share(fast=False) == 1.0 / (1 * 16.0)


def test_waiting_share_of_no_worker() -> None:
    assert Accounts().waiting_share(fast=True) is None
    accounts = accounts_of(record(row(0, waiting_seconds=4.0)))
    assert accounts.waiting_share(fast=True) == 0.4
    assert accounts.waiting_share(fast=False) is None


def test_waiting_share_of_a_worker_that_came_later() -> None:
    """It is one of the tier's workers, whenever it came."""
    accounts = accounts_of(
        record(row(0, waiting_seconds=2.0)),
        record(row(0, waiting_seconds=2.0), row(1, waiting_seconds=4.0), round=2),
    )
    assert accounts.waiting_share(fast=True) == 8.0 / (2 * 20.0)


def test_sample_and_weight_share_hand_worked() -> None:
    accounts = accounts_of(*two_rounds())
    assert accounts.sample_share(fast=False) == 48 / 240
    assert accounts.sample_share(fast=True) == 192 / 240
    assert accounts.weight_share(fast=False) == 0.25
    assert accounts.weight_share(fast=True) == 0.75


def test_shares_before_the_first_round() -> None:
    assert Accounts().sample_share(fast=True) == 0.0
    assert Accounts().weight_share(fast=True) == 0.0
    assert Accounts().training_seconds == 0.0


def test_slow_only_seconds_hand_worked() -> None:
    """The last fast worker waits 3 s for the slow one in the first round."""
    first, second = two_rounds()
    assert accounts_of(first).wall.slow_only_seconds == 3.0
    assert accounts_of(first, first).wall.slow_only_seconds == 6.0
    assert accounts_of(first).longer_for_slow() == pytest.approx(3 / 7)
    # Now a fast worker is the last one: without the slow one nothing would have been shorter.
    assert accounts_of(second).wall.slow_only_seconds == 0.0
    assert accounts_of(second).longer_for_slow() == 0.0


def test_slow_only_seconds_without_fast_workers() -> None:
    accounts = accounts_of(record(row(0, fast=False, waiting_seconds=4.0)))
    assert accounts.wall.slow_only_seconds == 0.0


def test_slow_only_seconds_leaves_out_a_worker_that_failed() -> None:
    """It has no time at all; the last fast worker that computed waits 4 s for the slow one."""
    accounts = accounts_of(
        record(
            row(0, completed_steps=4, compute_seconds=5.0, waiting_seconds=4.0),
            row(1, failure="the process died"),
            row(2, fast=False, completed_steps=1, compute_seconds=9.0),
        )
    )
    assert accounts.wall.slow_only_seconds == 4.0


SPEEDS = {0: 1.0, 1: 1.25, 2: 4.0}
"""Alone, the workers of `two_rounds` need 4, 5 and 4 s, then 4 s and 8 s; 1 s and 1 s are moved."""


def test_device_seconds_hand_worked() -> None:
    first, second = two_rounds()
    assert Accounts(seconds_per_step=SPEEDS).device_seconds is None
    assert accounts_of(first, speeds=SPEEDS).device_seconds == 6.0
    accounts = accounts_of(first, second, speeds=SPEEDS)
    assert accounts.device_seconds == 15.0
    # The clock is still the measured one.
    assert accounts.waiting_share(fast=True) == 0.25
    assert accounts.training_seconds == 16.75


@pytest.mark.parametrize("speeds", [{}, {0: 1.0, 1: 1.25}, {**SPEEDS, 1: 0.0}])
def test_device_seconds_need_the_speed_of_everybody_that_took_part(
    speeds: dict[int, float],
) -> None:
    first, second = two_rounds()
    assert accounts_of(first, second, speeds=speeds).device_seconds is None
    # One unknown round is enough, whatever comes before or after it.
    accounts = accounts_of(first, speeds=SPEEDS)
    accounts.seconds_per_step = {}
    accounts.add(second)
    accounts.seconds_per_step = SPEEDS
    accounts.add(first)
    assert accounts.device_seconds is None


def test_device_seconds_do_not_need_the_speed_of_one_that_only_failed() -> None:
    _, second = two_rounds()
    assert accounts_of(second, speeds={0: 1.0, 2: 4.0}).device_seconds == 9.0


def test_device_clock_waiting_share_hand_worked() -> None:
    """The fast ones wait 1, 0 and 4 s, the slow one 1 s; the one that failed waits for nobody."""
    accounts = accounts_of(*two_rounds(), clock="device", speeds=SPEEDS)
    assert accounts.waiting_share(fast=True) == 5 / (2 * 15)
    assert accounts.waiting_share(fast=False) == 1 / 15
    assert accounts.longer_for_slow() == pytest.approx(4 / 11)


def test_device_clock_without_speeds_knows_nothing() -> None:
    first, _ = two_rounds()
    accounts = accounts_of(first, clock="device")
    assert accounts.waiting_share(fast=True) is None
    assert accounts.longer_for_slow() is None
    assert accounts.recent(first) == ""


def test_device_clock_recent() -> None:
    first, second = two_rounds()
    accounts = accounts_of(first, second, clock="device", speeds=SPEEDS)
    assert accounts.recent(first) == "fast waits 8%, slow waits 17%"  # 1 / (2 x 6), 1 / 6
    assert accounts.recent(second) == "fast waits 22%, slow waits 0%"  # 4 / (2 x 9)


def test_recent_says_who_waits() -> None:
    first, second = two_rounds()
    accounts = accounts_of(first, second)
    assert accounts.recent(first) == "fast waits 40%, slow waits 0%"
    assert accounts.recent(second) == "fast waits 0%, slow waits 17%"
    assert accounts.recent(record(row(0, waiting_seconds=1.0))) == "fast waits 10%"


tiers = st.lists(
    st.tuples(
        st.booleans(), st.floats(0, 10), st.floats(0, 10), st.integers(0, 50), st.floats(0, 1)
    ),
    min_size=1,
    max_size=5,
)


@given(tiers, st.integers(1, 4))
def test_shares_of_both_tiers_add_up(
    workers: list[tuple[bool, float, float, int, float]], rounds: int
) -> None:
    total_weight = sum(weight for *_, weight in workers) or 1.0
    rows = [
        row(
            i,
            fast=fast,
            completed_steps=steps,
            num_examples=16 * steps,
            compute_seconds=compute,
            waiting_seconds=waiting,
            weight=weight / total_weight,
        )
        for i, (fast, compute, waiting, steps, weight) in enumerate(workers)
    ]
    accounts = accounts_of(*[record(*rows, round=n + 1) for n in range(rounds)])
    assert accounts.samples == rounds * sum(one.num_examples for one in rows)
    if accounts.samples:
        both = accounts.sample_share(fast=True) + accounts.sample_share(fast=False)
        assert both == pytest.approx(1.0)
    if any(weight for *_, weight in workers):
        both = accounts.weight_share(fast=True) + accounts.weight_share(fast=False)
        assert both == pytest.approx(1.0)
    for fast in (True, False):
        share = accounts.waiting_share(fast)
        assert (share is None) == (fast not in [one.fast for one in rows])
        if share is not None:
            assert 0.0 <= share <= 1.0
