import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.sample_draws import permutation_stream
from flower_blsgd.algorithm.sampling import (
    EpochRequest,
    Pool,
    SeparatedSampler,
    TierName,
    UnifiedSampler,
    UniformSampler,
)

from .teams import QUICK, distinct_losses, table_of, team


def _request(
    num_fast: int = 2,
    num_slow: int = 1,
    *,
    fast_samples: int = 20,
    slow_samples: int = 10,
    rounds: int = 2,
    seed: int = 0,
    epoch: int = 1,
    samples_before: int = 0,
) -> EpochRequest:
    return EpochRequest(
        seed,
        epoch,
        rounds,
        team(num_fast, num_slow),
        (fast_samples,) * num_fast + (slow_samples,) * num_slow,
        samples_before,
    )


def _fast_and_slow(
    table: LossTable, high_loss_ratio: float = 0.5, **changes: int
) -> tuple[np.ndarray, np.ndarray]:
    fast, slow = SeparatedSampler(high_loss_ratio).pools(_request(**changes), table)
    return fast.indices, slow.indices


def _highest(losses: np.ndarray, count: int) -> set[int]:
    return set(np.argsort(-losses)[:count].tolist())


# the request


def test_request_tiers_and_set_sizes() -> None:
    request = _request(2, 3, fast_samples=20, slow_samples=7, rounds=4)
    assert request.tier(True) == (0, 1)
    assert request.tier(False) == (2, 3, 4)
    assert request.set_size((0, 1)) == 160  # 4 * (20 + 20)
    assert request.set_size((2, 3, 4)) == 84  # 4 * (7 + 7 + 7)


# the uniform stream


def test_uniform_sampler_is_one_pool_for_everybody() -> None:
    request = _request(2, 1, rounds=3, samples_before=17, seed=5)
    pools = UniformSampler().pools(request, LossTable(90))
    assert [pool.members for pool in pools] == [(0, 1, 2)]
    # 3 * (20 + 20 + 10) = 150 samples from place 17 on
    assert pools[0].indices.tolist() == permutation_stream(5, 90, 17, 150).tolist()


def test_uniform_sampler_reads_no_losses() -> None:
    request = _request()
    unseen = UniformSampler().pools(request, LossTable(100))[0].indices
    seen = UniformSampler().pools(request, table_of(distinct_losses(100)))[0].indices
    assert unseen.tolist() == seen.tolist()


def test_uniform_sampler_does_with_one_tier() -> None:
    assert not UniformSampler().needs_both_tiers
    assert [p.members for p in UniformSampler().pools(_request(2, 0), LossTable(9))] == [(0, 1)]
    assert [p.members for p in UniformSampler().pools(_request(0, 2), LossTable(9))] == [(0, 1)]


# the paper's method


@pytest.mark.parametrize("ratio", [-0.01, 1.01, math.nan, math.inf])
def test_separated_sampler_impossible_ratio_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="high_loss_ratio"):
        SeparatedSampler(ratio)


def test_separated_sampler_default_ratio_is_a_half() -> None:
    assert SeparatedSampler().high_loss_ratio == 0.5


def test_separated_sampler_pools_are_the_tiers_in_worker_order() -> None:
    pools = SeparatedSampler().pools(_request(3, 2, rounds=2), LossTable(500))
    assert [pool.members for pool in pools] == [(0, 1, 2), (3, 4)]
    assert [len(pool.indices) for pool in pools] == [120, 40]  # 2 * 3 * 20, 2 * 2 * 10


def test_separated_sampler_needs_both_tiers_but_outlives_the_loss_of_one() -> None:
    """At the start a missing tier is refused; one lost in mid-run is not (DESIGN.md, section 3)."""
    assert SeparatedSampler().needs_both_tiers
    for request in (_request(2, 0), _request(0, 2)):
        pools: list[Pool] = SeparatedSampler().pools(request, LossTable(100))
        assert [pool.members for pool in pools] == [(0, 1)]


def test_separated_sampler_fast_workers_get_the_hard_half() -> None:
    # 80 fast samples of 200: the 40 highest and 40 of the other 160
    losses = distinct_losses(200)
    fast, _ = _fast_and_slow(table_of(losses), rounds=2)
    assert len(fast) == len(set(fast.tolist())) == 80
    assert _highest(losses, 40) <= set(fast.tolist())
    # were all by loss, none would lie outside the highest 80; by chance 40 * 120 / 160 = 30 do
    assert 15 < len(set(fast.tolist()) - _highest(losses, 80)) <= 40


def test_separated_sampler_slow_workers_get_a_uniform_draw() -> None:
    # lambda 1, 20 of 100 in 400 epochs: each sample 80 times, standard deviation 8
    table = table_of(distinct_losses(100))
    hits = np.zeros(100, int)
    for epoch in range(1, 401):
        slow = _fast_and_slow(table, 1.0, epoch=epoch, rounds=2)[1]
        assert len(set(slow.tolist())) == 20
        hits[slow] += 1
    assert (abs(hits - 80) < 40).all()


def test_separated_sampler_slow_draw_ignores_the_losses_and_lambda() -> None:
    draws = [
        _fast_and_slow(table, ratio)[1].tolist()
        for table in (LossTable(100), table_of(distinct_losses(100)))
        for ratio in (0.0, 0.5, 1.0)
    ]
    assert all(draw == draws[0] for draw in draws)


def test_separated_sampler_draws_are_independent_and_may_overlap() -> None:
    # 400 of 1,000 each: 160 in both, standard deviation sqrt(400 * 0.4 * 0.6 * 0.6) = 7.6
    changes = {"num_slow": 2, "fast_samples": 200, "slow_samples": 200, "rounds": 1}
    for epoch in range(1, 6):
        fast, slow = _fast_and_slow(LossTable(1000), 0.0, epoch=epoch, **changes)
        assert abs(len(np.intersect1d(fast, slow)) - 160) < 40


def test_separated_sampler_first_epoch_is_uniform() -> None:
    # nothing is recorded: 8 of 20 in 600 runs: each 240 times, standard deviation 12
    hits = np.zeros(20, int)
    for seed in range(600):
        fast, _ = _fast_and_slow(
            LossTable(20), 0.5, seed=seed, rounds=1, fast_samples=4, slow_samples=2
        )
        hits[fast] += 1
    assert (abs(hits - 240) < 62).all()


def test_separated_sampler_unseen_are_picked_first() -> None:
    # 80 fast samples, 40 of them by loss: 30 unseen and the 10 highest of the seen 170
    losses = distinct_losses(200) * np.float32(1e30)
    losses[50:80] = math.inf
    fast, _ = _fast_and_slow(table_of(losses), rounds=2)
    assert set(range(50, 80)) <= set(fast.tolist())
    losses[50:80] = 0
    assert _highest(losses, 10) <= set(fast.tolist())


def test_separated_sampler_more_unseen_than_fit() -> None:
    losses = np.full(200, 1e30, np.float32)
    losses[60:] = math.inf
    fast, _ = _fast_and_slow(table_of(losses), 1.0, rounds=2)
    assert fast.min() >= 60
    again, _ = _fast_and_slow(table_of(losses), 1.0, rounds=2, seed=1)
    assert set(again.tolist()) != set(fast.tolist())


@QUICK
@given(st.integers(0, 10**9), st.integers(1, 500), st.floats(0, 1), st.integers(0, 10**6))
def test_separated_sampler_is_a_function_of_seed_epoch_and_losses(
    seed: int, epoch: int, ratio: float, samples_before: int
) -> None:
    losses = np.random.default_rng(seed).integers(0, 3, 60).astype(np.float32)  # many ties
    first = _fast_and_slow(table_of(losses), ratio, seed=seed, epoch=epoch)
    np.random.default_rng(0).random(5)
    again = _fast_and_slow(
        table_of(losses), ratio, seed=seed, epoch=epoch, samples_before=samples_before
    )
    for one, other in zip(first, again, strict=True):
        assert one.tolist() == other.tolist()


def test_separated_sampler_every_epoch_and_seed_is_another_draw() -> None:
    table = table_of(distinct_losses(100))
    draws = [_fast_and_slow(table, seed=s, epoch=e) for s in (0, 1) for e in (1, 2, 3)]
    for tier in (0, 1):
        assert len({tuple(draw[tier].tolist()) for draw in draws}) == 6


def test_separated_sampler_leaves_the_table_as_it_was() -> None:
    table = table_of(distinct_losses(100))
    _fast_and_slow(table, rounds=4)
    assert table.losses.tolist() == distinct_losses(100).tolist()
    assert (table.rounds == 1).all()


# the tier that gets the highest losses


def test_separated_high_loss_to_slow_worked() -> None:
    """N_F = 80 uniform, N_S = 20: half of these are the 10 highest."""
    losses = distinct_losses(200)
    request = _request()
    fast, slow = SeparatedSampler(0.5, "slow").pools(request, table_of(losses))
    assert (len(fast.indices), len(slow.indices)) == (80, 20)
    assert (fast.members, slow.members) == ((0, 1), (2,))
    top = _highest(losses, 10)
    assert top <= set(slow.indices.tolist())
    # 80 of 200 drawn uniformly hold all ten with a probability below 1e-4
    assert not top <= set(fast.indices.tolist())
    assert len(set(fast.indices.tolist())) == 80


def test_separated_high_loss_to_slow_with_all_of_them() -> None:
    losses = distinct_losses(200)
    fast, slow = SeparatedSampler(1.0, "slow").pools(_request(), table_of(losses))
    assert set(slow.indices.tolist()) == _highest(losses, 20)
    # with lambda = 0 for it, the fast tier's draw is the same as that of a uniform one
    other, _ = SeparatedSampler(0.0).pools(_request(), table_of(losses))
    assert fast.indices.tolist() == other.indices.tolist()


# unified: the second tier gets what the first one left


@pytest.mark.parametrize("to", ["fast", "slow"])
def test_unified_worked(to: TierName) -> None:
    """N = 100: the first tier takes its half by loss, the other takes all that is left."""
    losses = distinct_losses(100)
    fast, slow = UnifiedSampler(0.5, to).pools(_request(), table_of(losses))
    assert (fast.members, slow.members) == ((0, 1), (2,))
    both = fast.indices.tolist() + slow.indices.tolist()
    assert (len(fast.indices), len(slow.indices)) == (80, 20)
    assert sorted(both) == list(range(100))  # 80 + 20 = N: everything exactly once
    first = fast if to == "fast" else slow
    assert _highest(losses, len(first.indices) // 2) <= set(first.indices.tolist())


def test_unified_rest_is_uniform_where_too_little_is_left() -> None:
    """N = 90: of the slow worker's 20, the 10 that are left come first, then 10 of all 90."""
    losses = distinct_losses(90)
    counts = np.zeros(90)
    for seed in range(300):
        fast, slow = UnifiedSampler(0.5).pools(_request(seed=seed), table_of(losses))
        left = set(range(90)) - set(fast.indices.tolist())
        assert len(slow.indices) == 20
        assert set(slow.indices[:10].tolist()) == left
        rest = slow.indices[10:].tolist()
        assert len(set(rest)) == 10
        counts[rest] += 1
    # 300 x 10 / 90 = 33.3 each, standard deviation 5.4: within 5.5 of them
    assert counts.min() > 3
    assert counts.max() < 64


def test_unified_nothing_left_at_all_is_uniform() -> None:
    fast, slow = UnifiedSampler(0.5).pools(_request(), table_of(distinct_losses(80)))
    assert sorted(fast.indices.tolist()) == list(range(80))
    assert len(set(slow.indices.tolist())) == 20


def test_unified_needs_both_tiers() -> None:
    assert UnifiedSampler().needs_both_tiers
    (pool,) = UnifiedSampler().pools(_request(2, 0), table_of(distinct_losses(100)))
    assert pool.members == (0, 1)  # a tier that was lost in mid-run


@QUICK
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(20, 300),
    st.floats(0, 1),
    st.sampled_from(["fast", "slow"]),
    st.integers(0, 99),
)
def test_unified_tiers_are_disjoint_as_far_as_n_suffices(
    num_fast: int,
    num_slow: int,
    fast_samples: int,
    slow_samples: int,
    num_samples: int,
    ratio: float,
    to: TierName,
    seed: int,
) -> None:
    request = _request(
        num_fast, num_slow, fast_samples=fast_samples, slow_samples=slow_samples, seed=seed
    )
    table = table_of(distinct_losses(num_samples, seed))
    fast, slow = UnifiedSampler(ratio, to).pools(request, table)
    sizes = 2 * num_fast * fast_samples, 2 * num_slow * slow_samples
    assert (len(fast.indices), len(slow.indices)) == sizes
    first, second = (fast, slow) if to == "fast" else (slow, fast)
    taken = set(first.indices.tolist())
    left = num_samples - len(taken)
    own = second.indices[: min(left, len(second.indices))]
    assert len(np.unique(own)) == len(own)
    assert not taken & set(own.tolist())
    for indices in (fast.indices, slow.indices):
        assert indices.dtype == np.int32
        assert indices.min() >= 0
        assert indices.max() < num_samples
    again = UnifiedSampler(ratio, to).pools(request, table)
    assert [p.indices.tolist() for p in again] == [fast.indices.tolist(), slow.indices.tolist()]
