"""What an epoch's choice of samples looks like."""

import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.epoch_plan import EpochPlan, RoundShape, plan_epoch
from flower_blsgd.algorithm.local_steps import Participant
from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.sampling import Pool, Sampler, SeparatedSampler, UniformSampler
from flower_blsgd.algorithm.sampling_stats import SamplingStats, sampling_stats

from .teams import QUICK, blocks_of, team


def table_with(losses: list[float], rounds: list[int]) -> LossTable:
    table = LossTable(len(losses))
    table.losses[:] = losses
    table.rounds[:] = rounds
    return table


def plan_of(num_samples: int, fast: list[int], slow: list[int]) -> EpochPlan:
    """Two rounds of a fast and a slow worker with two samples each."""
    shape = RoundShape(local_steps=(1, 1), batch_sizes=(2, 2))
    pools = Pool(np.array(fast, np.int32), (0,)), Pool(np.array(slow, np.int32), (1,))
    return EpochPlan(2, 2, shape, pools, num_samples)


def test_stats_hand_worked() -> None:
    """The losses are the indices; 8 and 9 were never seen, and the fast worker gets 1 twice."""
    unseen = math.inf
    table = table_with([0, 1, 2, 3, 4, 5, 6, 7, unseen, unseen], [2, 2, 2, 2, 4, 4, 6, 6, 0, 0])
    plan = plan_of(10, fast=[0, 1, 1, 2], slow=[7, 8, 9, 0])
    stats = sampling_stats(plan, team(1, 1, 2), table, last_round=6, rounds_per_epoch=2.0)
    assert stats == SamplingStats(
        all_loss_mean=3.5,
        all_loss_p10=pytest.approx(0.7),
        all_loss_p90=pytest.approx(6.3),
        fast_picked_loss_mean=1.0,  # (0 + 1 + 1 + 2) / 4
        slow_picked_loss_mean=3.5,  # (7 + 0) / 2: the others have no recorded loss
        # (0 + 1 + 1 + 2 + 7 + 0) / 6, over 3.5
        picked_over_all_loss=pytest.approx(11 / 21),
        distinct_samples=6,  # 0, 1, 2, 7, 8, 9
        share_never_seen=pytest.approx(0.2),
        share_left_out=0.7,  # all but 0, 1 and 2
        loss_age_epochs_mean=1.25,  # (4 x 4 + 2 x 2 + 2 x 0) / 8 rounds
        loss_age_epochs_p90=2.0,
        loss_age_epochs_max=2.0,  # round 2, after round 6
        left_out_age_epochs_mean=pytest.approx(0.8),  # (4 + 2 + 2 + 0 + 0) / 5 rounds
        left_out_age_epochs_p90=2.0,
    )


@pytest.mark.parametrize(("old", "age"), [(1, 0.0), (2, 3.0)])
def test_age_percentile_nine_of_ten_are_no_older(old: int, age: float) -> None:
    table = table_with([1.0] * 10, [1] * old + [4] * (10 - old))
    plan = plan_of(10, [0, 1, 2, 3], [0, 1, 2, 3])
    stats = sampling_stats(plan, team(1, 1, 2), table, last_round=4, rounds_per_epoch=1.0)
    assert stats.loss_age_epochs_p90 == age


def test_first_epoch_knows_no_loss_and_no_age() -> None:
    plan = plan_of(10, [0, 1, 2, 3], [4, 5, 6, 7])
    stats = sampling_stats(plan, team(1, 1, 2), LossTable(10), 0, 1.0)
    assert (stats.share_never_seen, stats.share_left_out) == (1.0, 0.6)
    assert stats.distinct_samples == 8
    known = ("share_never_seen", "share_left_out", "distinct_samples")
    figures = dataclasses.asdict(stats)
    assert all(math.isnan(value) for name, value in figures.items() if name not in known)


def test_bias_meter_worked() -> None:
    """Losses 1, 2, 3, 4, 10 of mean 4; a team without a slow worker picks 3, 10, 10 and 1."""
    table = table_with([1, 2, 3, 4, 10], [1] * 5)
    pool = Pool(np.array([2, 4, 4, 0], np.int32), (0,))
    plan = EpochPlan(2, 2, RoundShape((1,), (2,)), (pool,), 5)
    stats = sampling_stats(plan, team(1, 0, 2), table, 1, 1.0)
    assert stats.picked_over_all_loss == 1.5  # (3 + 10 + 10 + 1) / 4 = 6 of 4
    assert stats.distinct_samples == 3


def test_bias_meter_is_1_where_everybody_reads_everything_once() -> None:
    table = table_with([1, 2, 3, 4, 10, 0, 0, 5], [1] * 8)
    stats = sampling_stats(plan_of(8, [0, 1, 2, 3], [4, 5, 6, 7]), team(1, 1, 2), table, 1, 1.0)
    assert stats.picked_over_all_loss == 1.0
    assert stats.distinct_samples == 8


def test_bias_meter_of_losses_that_are_all_0_is_not_known() -> None:
    table = table_with([0, 0, 0, 0], [1] * 4)
    stats = sampling_stats(plan_of(4, [0, 1, 2, 3], [0, 1, 2, 3]), team(1, 1, 2), table, 1, 1.0)
    assert math.isnan(stats.picked_over_all_loss)


@pytest.mark.parametrize("fast", [True, False])
def test_team_of_one_tier(fast: bool) -> None:
    table = table_with([1, 2, 3, 4], [1, 1, 1, 1])
    pool = Pool(np.array([0, 1], np.int32), (0,))
    plan = EpochPlan(2, 1, RoundShape((1,), (2,)), (pool,), 4)
    stats = sampling_stats(plan, [Participant(fast, 2)], table, 1, 1.0)
    picked = [stats.fast_picked_loss_mean, stats.slow_picked_loss_mean]
    if not fast:
        picked.reverse()
    assert picked[0] == 1.5
    assert math.isnan(picked[1])
    assert stats.share_left_out == (0.5 if fast else 1.0)


def test_nothing_left_out_has_no_age() -> None:
    table = table_with([1, 2, 3, 4], [1, 1, 1, 1])
    stats = sampling_stats(plan_of(4, [0, 1, 2, 3], [0, 1, 2, 3]), team(1, 1, 2), table, 1, 1.0)
    assert stats.share_left_out == 0.0
    assert stats.loss_age_epochs_mean == 0.0
    assert math.isnan(stats.left_out_age_epochs_mean)
    assert math.isnan(stats.left_out_age_epochs_p90)


def test_figures_are_plain_numbers() -> None:
    """They go into a csv file: numpy's would be written with their type."""
    table = table_with([1, 2, 3, 4], [1, 1, 1, 1])
    stats = sampling_stats(plan_of(4, [0, 1, 2, 2], [0, 1, 2, 3]), team(1, 1, 2), table, 1, 1.0)
    for name, value in dataclasses.asdict(stats).items():
        assert type(value) is (int if name == "distinct_samples" else float), name


@QUICK
@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(2, 4),
    st.sampled_from([UniformSampler(), SeparatedSampler(0.5), SeparatedSampler(1.0)]),
    st.integers(0, 100),
    st.sampled_from([5, 2**17]),
)
def test_stats_are_those_of_the_orders(
    num_fast: int, num_slow: int, batch_size: int, sampler: Sampler, seed: int, block: int
) -> None:
    """Counted order by order, whatever the pools look like and however often an index comes."""
    rng = np.random.default_rng(seed)
    participants = team(num_fast, num_slow, batch_size)
    shape = RoundShape((2,) * num_fast + (1,) * num_slow, (batch_size,) * len(participants))
    num_samples = sum(shape.samples_per_round) + int(rng.integers(0, 20))
    rounds = rng.integers(0, 9, num_samples)
    losses = np.where(rounds > 0, rng.exponential(size=num_samples), np.inf).astype(np.float32)
    table = table_with(losses.tolist(), rounds.tolist())
    plan = plan_epoch(
        seed=seed,
        epoch=3,
        mode="samples",
        participants=participants,
        shape=shape,
        sampler=sampler,
        table=table,
        samples_before=num_samples,
    )
    with blocks_of(block):
        stats = sampling_stats(plan, participants, table, last_round=8, rounds_per_epoch=2.5)

    given_to: dict[bool, list[int]] = {True: [], False: []}
    for worker, participant in enumerate(participants):
        for round_in_epoch in range(plan.rounds):
            given_to[participant.fast] += plan.indices(round_in_epoch, worker).tolist()
    for fast, mean in ((True, stats.fast_picked_loss_mean), (False, stats.slow_picked_loss_mean)):
        known = [float(losses[i]) for i in given_to[fast] if rounds[i]]
        assert mean == pytest.approx(np.mean(known) if known else math.nan, nan_ok=True)
    known = [float(losses[i]) for i in given_to[True] + given_to[False] if rounds[i]]
    everything = np.mean([float(losses[i]) for i in range(num_samples) if rounds[i]] or [math.nan])
    bias = np.mean(known or [math.nan]) / everything
    assert stats.picked_over_all_loss == pytest.approx(bias, nan_ok=True)
    assert stats.distinct_samples == len(set(given_to[True]) | set(given_to[False]))
    left_out = sorted(set(range(num_samples)) - set(given_to[True]))
    assert stats.share_left_out == pytest.approx(len(left_out) / num_samples)
    assert stats.share_left_out == pytest.approx(plan.share_left_out(participants))
    oldest = [(8 - r) / 2.5 for r in rounds if r]
    assert stats.loss_age_epochs_max == pytest.approx(max(oldest, default=math.nan), nan_ok=True)
    recorded = losses[rounds > 0].astype(np.float64)
    low, high = np.percentile(recorded, [10, 90]) if len(recorded) else (math.nan, math.nan)
    assert stats.all_loss_p10 == pytest.approx(low, nan_ok=True)
    assert stats.all_loss_p90 == pytest.approx(high, nan_ok=True)
    for chosen, mean, ninetieth in (
        (range(num_samples), stats.loss_age_epochs_mean, stats.loss_age_epochs_p90),
        (left_out, stats.left_out_age_epochs_mean, stats.left_out_age_epochs_p90),
    ):
        ages = [(8 - rounds[i]) / 2.5 for i in chosen if rounds[i]]
        if ages:
            assert mean == pytest.approx(np.mean(ages))
            assert np.mean(np.array(ages) <= ninetieth + 1e-9) >= 0.9
            assert ninetieth == pytest.approx(np.percentile(ages, 90, method="inverted_cdf"))
        else:
            assert math.isnan(mean)
            assert math.isnan(ninetieth)


def test_stats_of_ten_million_samples_take_little_time() -> None:
    """Half a second on one core; a loop over the samples in Python would take minutes."""
    num_samples = 10_000_000
    rng = np.random.default_rng(0)
    table = LossTable(num_samples)
    table.losses[:] = rng.random(num_samples, np.float32)
    table.rounds[:] = rng.integers(1, 700, num_samples, np.int32)
    indices = rng.permutation(num_samples).astype(np.int32)
    pool = Pool(indices[: 1000 * 9000], (0, 1))
    plan = EpochPlan(2, 1000, RoundShape((80, 10), (100, 100)), (pool,), num_samples)
    began = time.process_time()
    stats = sampling_stats(plan, team(1, 1, 100), table, 700, 700.0)
    assert time.process_time() - began < 30.0
    assert stats.all_loss_mean == pytest.approx(0.5, abs=1e-3)
    assert stats.share_left_out == pytest.approx(0.2)
    assert stats.loss_age_epochs_p90 == pytest.approx(0.9, abs=5e-3)
