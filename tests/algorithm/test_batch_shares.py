"""Shares by throughput, as integers that sum exactly."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.batch_shares import (
    BalancedBatches,
    balanced_batches,
    throughput_shares,
    whole_parts,
)
from flower_blsgd.algorithm.local_steps import Participant

from .teams import QUICK

_ratios = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=10)


def team_of(batch_size: int, *speed_ratios: float | None) -> list[Participant]:
    return [Participant(True, batch_size, ratio) for ratio in speed_ratios]


def test_throughput_shares_worked() -> None:
    # gamma 1, 0.5, 0.5: half of all samples per second, and a quarter each
    assert throughput_shares([1.0, 0.5, 0.5]) == [0.5, 0.25, 0.25]


def test_throughput_shares_are_equal_while_a_speed_is_unknown() -> None:
    assert throughput_shares([1.0, None, 0.1, 0.2]) == [0.25] * 4


@pytest.mark.parametrize(
    ("total", "shares", "parts"),
    [
        (10, [0.5, 0.25, 0.25], [5, 3, 2]),  # 5, 2.5, 2.5: the tie goes to the lower place
        (7, [1, 1, 1], [3, 2, 2]),
        (100, [1, 2, 3.5], [15, 31, 54]),  # 15.38, 30.77, 53.85: two more, to .85 and .77
        (0, [1, 2], [0, 0]),
        (3, [1e-9, 1.0], [0, 3]),
    ],
)
def test_whole_parts_worked(total: int, shares: list[float], parts: list[int]) -> None:
    assert whole_parts(total, shares) == parts


@QUICK
@given(st.integers(0, 10_000), _ratios)
def test_whole_parts_sum_exactly_and_are_within_one(total: int, shares: list[float]) -> None:
    parts = whole_parts(total, shares)
    assert sum(parts) == total
    for part, share in zip(parts, shares, strict=True):
        assert abs(part - total * share / sum(shares)) < 1 + 1e-6


@pytest.mark.parametrize(
    ("total", "shares", "batches"),
    [
        (96, [0.5, 0.25, 0.25], [48, 24, 24]),
        # 60.6, 2.4, 1.0: the last gets 2, the others share 62 as 25 : 1 (59.6 and 2.4)
        (64, [0.947, 0.0375, 0.0155], [60, 2, 2]),
        # 18.2, 1.6, 0.2: first only 0.2 is too small; of 18 the other two would get 16.5 and 1.5,
        # a tie of remainders that gives the second 1; so it is 2 as well
        (20, [0.91, 0.08, 0.01], [16, 2, 2]),
        (6, [0.98, 0.01, 0.01], [2, 2, 2]),
    ],
)
def test_balanced_batches_worked(total: int, shares: list[float], batches: list[int]) -> None:
    assert balanced_batches(total, shares) == batches


@QUICK
@given(_ratios, st.integers(2, 300))
def test_balanced_batches_sum_exactly_and_nobody_has_fewer_than_two(
    ratios: list[float], batch_size: int
) -> None:
    total = batch_size * len(ratios)
    batches = balanced_batches(total, throughput_shares(ratios))
    assert sum(batches) == total
    assert min(batches) >= 2
    for one, other in zip(range(len(ratios)), range(1, len(ratios)), strict=False):
        if ratios[one] > ratios[other]:  # the faster never has less, but for a rounding
            assert batches[one] >= batches[other] - 1


def test_balanced_batches_less_than_two_each_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 5 cannot be shared by 3"):
        balanced_batches(5, [1, 1, 1])


def test_policy_one_step_each_and_the_sum_of_the_common_batches() -> None:
    policy = BalancedBatches()
    workers = team_of(32, 1.0, 1.0, 0.25)
    # 96 samples by 4 : 4 : 1: 42.67, 42.67, 10.67; two more, to the lowest places
    assert policy.local_steps(workers) == [1, 1, 1]
    assert policy.batch_sizes(workers) == [43, 43, 10]
    assert policy.batch_sizes(team_of(32, None, None)) == [32, 32]
    assert policy.follows_speeds


def test_check_refuses_and_the_named_batch_size_is_accepted_and_the_smallest() -> None:
    # shares 1/1.01 and 0.01/1.01: of 2 B samples the slow one has 0.0198 B >= 1.5 from B = 75.75
    policy = BalancedBatches()
    with pytest.raises(ValueError, match=r"batch-size = 32 .*use batch-size = 76 or more"):
        policy.check(team_of(32, 1.0, 0.01))
    policy.check(team_of(76, 1.0, 0.01))
    with pytest.raises(ValueError, match="batch-size = 76"):
        policy.check(team_of(75, 1.0, 0.01))


def test_check_accepts_what_rounds_to_two_and_unknown_speeds() -> None:
    BalancedBatches().check(team_of(2, None, None, None))
    BalancedBatches().check(team_of(32, 1.0, 0.05))  # 64 x 0.0476 = 3.05


@QUICK
@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=10), st.integers(2, 64))
def test_check_named_batch_size_is_always_accepted(ratios: list[float], batch_size: int) -> None:
    policy = BalancedBatches()
    try:
        policy.check(team_of(batch_size, *ratios))
    except ValueError as error:
        named = re.search(r"use batch-size = (\d+) or more", str(error))
        assert named is not None
        assert int(named[1]) > batch_size
        policy.check(team_of(int(named[1]), *ratios))
    assert sum(policy.batch_sizes(team_of(batch_size, *ratios))) == batch_size * len(ratios)
