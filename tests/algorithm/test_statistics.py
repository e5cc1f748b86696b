import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.epoch_plan import EpochPlan, RoundShape, plan_epoch
from flower_blsgd.algorithm.sampling import (
    LossTable,
    SampleList,
    Sampler,
    SeparatedSampler,
    UniformSampler,
)
from flower_blsgd.algorithm.statistics import SamplingStats, sampling_stats

from .workers import table_of, workers

PAIR = workers(1, 1, 2)


def plan_of(fast: list[int], slow: list[int]) -> EpochPlan:
    """Two rounds of a fast and a slow worker with two samples each."""
    shape = RoundShape(local_steps=(1, 1), batch_sizes=(2, 2))
    lists = SampleList(np.array(fast, np.int32), (0,)), SampleList(np.array(slow, np.int32), (1,))
    return EpochPlan(2, 2, shape, lists)


def test_stats_hand_worked() -> None:
    """The losses are the indices; 8 and 9 were never seen, and the fast worker gets 1 twice."""
    unseen = math.inf
    table = table_of([0, 1, 2, 3, 4, 5, 6, 7, unseen, unseen], [2, 2, 2, 2, 4, 4, 6, 6, 0, 0])
    plan = plan_of(fast=[0, 1, 1, 2], slow=[7, 8, 9, 0])
    stats = sampling_stats(plan, PAIR, table, last_round=6, rounds_per_epoch=2.0)
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


def test_first_epoch_knows_no_loss_and_no_age() -> None:
    plan = plan_of([0, 1, 2, 3], [4, 5, 6, 7])
    stats = sampling_stats(plan, PAIR, LossTable(10), 0, 1.0)
    assert (stats.share_never_seen, stats.share_left_out) == (1.0, 0.6)
    assert stats.distinct_samples == 8
    known = ("share_never_seen", "share_left_out", "distinct_samples")
    figures = dataclasses.asdict(stats)
    for name, value in figures.items():  # plain numbers, for a csv file
        assert type(value) is (int if name == "distinct_samples" else float), name
    assert all(math.isnan(value) for name, value in figures.items() if name not in known)


@pytest.mark.parametrize(
    ("losses", "picked", "bias", "distinct"),
    [
        # mean 4; one fast worker picks 3, 10, 10 and 1: (3 + 10 + 10 + 1) / 4 = 6
        ([1, 2, 3, 4, 10], [[2, 4, 4, 0]], 1.5, 3),
        ([1, 2, 3, 4, 10, 0, 0, 5], [[0, 1, 2, 3], [4, 5, 6, 7]], 1.0, 8),  # everything once
        ([0, 0, 0, 0], [[0, 1, 2, 3], [0, 1, 2, 3]], math.nan, 4),  # no ratio of zeros
    ],
)
def test_bias_is_mean_loss_of_what_is_picked_over_that_of_all(
    losses: list[float], picked: list[list[int]], bias: float, distinct: int
) -> None:
    lists = tuple(SampleList(np.array(p, np.int32), (i,)) for i, p in enumerate(picked))
    plan = EpochPlan(2, 2, RoundShape((1,) * len(lists), (2,) * len(lists)), lists)
    stats = sampling_stats(plan, PAIR[: len(lists)], table_of(losses), 1, 1.0)
    assert stats.picked_over_all_loss == pytest.approx(bias, nan_ok=True)
    assert stats.distinct_samples == distinct


@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(2, 4),
    st.sampled_from([UniformSampler(), SeparatedSampler(0.5), SeparatedSampler(1.0)]),
    st.integers(0, 100),
)
def test_stats_are_those_of_the_orders(
    num_fast: int, num_slow: int, batch_size: int, sampler: Sampler, seed: int
) -> None:
    """Counted order by order, whatever the lists look like and however often an index comes."""
    rng = np.random.default_rng(seed)
    participants = workers(num_fast, num_slow, batch_size)
    shape = RoundShape((2,) * num_fast + (1,) * num_slow, (batch_size,) * len(participants))
    num_samples = sum(shape.samples_per_round) + int(rng.integers(0, 20))
    rounds = rng.integers(0, 9, num_samples)
    losses = np.where(rounds > 0, rng.exponential(size=num_samples), np.inf).astype(np.float32)
    table = table_of(losses.tolist(), rounds.tolist())
    plan = plan_epoch(
        seed=seed,
        epoch=3,
        participants=participants,
        shape=shape,
        sampler=sampler,
        table=table,
        samples_before=num_samples,
    )
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
