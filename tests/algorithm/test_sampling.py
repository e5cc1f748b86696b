import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.sampling import (
    EpochRequest,
    LossTable,
    Sampler,
    SeparatedSampler,
    TierName,
    UnifiedSampler,
    UniformSampler,
    draw_samples,
    highest_losses,
    permutation_stream,
)

from .workers import distinct_losses, highest, table_of, workers

# few values, so that ties are common; infinity is a sample that was never seen
_tied_losses = st.lists(
    st.sampled_from([0.0, -0.0, 0.25, 1.0, 1e-30, 7.5, 3.4e38, math.inf]),
    min_size=1,
    max_size=30,
)


# the loss table


def _record(table: LossTable, indices: list[int], losses: list[float], server_round: int) -> None:
    table.record(np.array(indices, np.int32), np.array(losses, np.float32), server_round)


def test_loss_table_starts_unseen() -> None:
    table = LossTable(4)
    assert len(table) == 4
    assert table.losses.dtype == np.float32
    assert (table.losses > np.finfo(np.float32).max).all()
    assert table.rounds.tolist() == [0, 0, 0, 0]
    assert math.isnan(table.mean_age_rounds(4))
    with pytest.raises(ValueError, match="num_samples"):
        LossTable(0)


def test_record_writes_losses_and_rounds_of_these_samples_only() -> None:
    table = LossTable(5)
    _record(table, [3, 1], [0.5, 2.0], 7)
    assert table.losses.tolist() == [math.inf, 2.0, math.inf, 0.5, math.inf]
    assert table.rounds.tolist() == [0, 7, 0, 7, 0]
    _record(table, [1], [0.25], 8)
    _record(table, [], [], 9)
    assert table.losses.tolist() == [math.inf, 0.25, math.inf, 0.5, math.inf]
    assert table.rounds.tolist() == [0, 8, 0, 7, 0]


def test_record_in_descending_worker_order_lets_the_lowest_index_win() -> None:
    table = LossTable(3)
    of_worker = {0: ([0, 1], [1.0, 1.5]), 1: ([1, 2], [2.0, 2.5]), 2: ([2, 0], [3.0, 3.5])}
    for worker in sorted(of_worker, reverse=True):
        _record(table, *of_worker[worker], 1)
    assert table.losses.tolist() == [1.0, 1.5, 2.5]
    _record(table, [0, 1, 0], [5.0, 1.0, 0.25], 2)  # twice in one order: the later loss
    assert table.losses.tolist() == [0.25, 1.0, 2.5]


def test_record_leaves_out_what_is_not_finite() -> None:
    table = table_of([1.0, 1.0, 1.0, 1.0])
    _record(table, [0, 1, 2, 3], [math.nan, math.inf, -math.inf, 2.0], 2)
    assert table.losses.tolist() == [1.0, 1.0, 1.0, 2.0]
    assert table.rounds.tolist() == [1, 1, 1, 2]


def test_mean_age_counts_recorded_losses_only() -> None:
    # ages at round 6: 4, 4, 1; the seven unseen do not count: 9 / 3 = 3
    table = table_of([1.0] * 3 + [math.inf] * 7, [2, 2, 5] + [0] * 7)
    assert table.mean_age_rounds(6) == pytest.approx(3.0)


# the highest losses


def _marked(losses: list[float], count: int, seed: int = 0) -> list[bool]:
    rng = np.random.default_rng(seed)
    return highest_losses(np.array(losses, np.float32), count, rng).tolist()


def test_highest_losses_worked() -> None:
    assert _marked([0.1, 5.0, 3.0, 4.0, 0.2], 2) == [False, True, False, True, False]
    assert _marked([0.1, 5.0, 3.0, 4.0, 0.2], 3) == [False, True, True, True, False]
    assert _marked([1.0, 2.0, 2.0], 0) == [False] * 3
    assert _marked([1.0, 2.0, 2.0], 3) == [True] * 3
    for count in (-1, 4):
        with pytest.raises(ValueError, match="count"):
            _marked([1.0, 2.0, 3.0], count)
    largest = float(np.finfo(np.float32).max)  # unseen ranks above every number
    assert _marked([largest, math.inf, largest, math.inf], 2) == [False, True, False, True]


@given(_tied_losses, st.data())
def test_highest_losses_is_top_k(losses: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(losses)))
    values = np.array(losses, np.float32)
    marked = highest_losses(values, count, np.random.default_rng(data.draw(st.integers(0, 99))))
    assert (marked.dtype, marked.shape) == (np.bool_, values.shape)
    assert np.count_nonzero(marked) == count
    if 0 < count < len(losses):
        assert values[marked].min() >= values[~marked].max()
    assert values.tobytes() == np.array(losses, np.float32).tobytes()


def test_highest_losses_ties_every_tied_sample_is_as_likely() -> None:
    # 9.0 is always in; 2 more out of five tied ones: each in 2/5 of 1,000 draws = 400,
    # standard deviation sqrt(1000 * 0.4 * 0.6) = 15.5; the seeds are fixed
    losses = [1.0, 2.0, 2.0, 9.0, 2.0, 2.0, 2.0]
    hits = np.sum([_marked(losses, 3, seed) for seed in range(1000)], axis=0)
    assert hits[0] == 0
    assert hits[3] == 1000
    assert (abs(hits[[1, 2, 4, 5, 6]] - 400) < 78).all()


# the uniform stream


@given(st.integers(0, 99), st.integers(1, 40), st.integers(0, 200), st.integers(0, 120))
def test_permutation_stream_is_one_stream_of_permutations(
    seed: int, num_samples: int, start: int, count: int
) -> None:
    whole = permutation_stream(seed, num_samples, 0, start + count)
    part = permutation_stream(seed, num_samples, start, count)
    assert part.dtype == np.int32
    assert part.tolist() == whole[start:].tolist()
    for begin in range(0, len(whole), num_samples):
        permutation = whole[begin : begin + num_samples].tolist()
        assert len(set(permutation)) == len(permutation)
        assert set(permutation) <= set(range(num_samples))


# one draw


def _drawn(losses: object, count: int, ratio: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return draw_samples(np.asarray(losses, np.float32), count, ratio, rng)


@given(_tied_losses, st.floats(0, 1), st.data())
def test_draw_samples_lists(losses: list[float], ratio: float, data: st.DataObject) -> None:
    """No index twice within a list; all full lists but the last; the top of each is the top-k."""
    num_samples = len(losses)
    count = data.draw(st.integers(0, 3 * num_samples + 1))
    values = np.array(losses, np.float32)
    drawn = _drawn(values, count, ratio, data.draw(st.integers(0, 99)))
    assert drawn.dtype == np.int32
    assert len(drawn) == count
    for start in range(0, count, num_samples):
        one = drawn[start : start + num_samples]
        assert len(np.unique(one)) == len(one)
        assert one.min() >= 0
        assert one.max() < num_samples
        top = math.floor(ratio * len(one) + 1e-9)
        chosen = np.sort(values[one])[::-1][:top]
        assert chosen.tolist() == np.sort(values)[::-1][:top].tolist()
    assert values.tobytes() == np.array(losses, np.float32).tobytes()


def test_draw_samples_worked() -> None:
    losses = distinct_losses(60)
    assert set(_drawn(losses, 20, 1.0).tolist()) == highest(losses, 20)
    # 20 of 60: the 10 highest, and 10 of the other 50
    half = set(_drawn(losses, 20, 0.5).tolist())
    assert len(half - highest(losses, 10)) == 10
    # 100 of 60: all shuffled, then 40 more: the 20 highest and 20 others, shuffled together
    drawn = _drawn(losses, 100, 0.5)
    assert sorted(drawn[:60].tolist()) == list(range(60))
    excess = drawn[60:]
    assert len(set(excess.tolist()) - highest(losses, 20)) == 20
    assert not set(excess[:20].tolist()) <= highest(losses, 20)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.75])
def test_draw_samples_rest_is_uniform_among_the_others(ratio: float) -> None:
    # 8 of 20 in 800 draws: the 8 * ratio highest always; each other in (8 - high) / (20 - high)
    # of them; the widest standard deviation is sqrt(800 / 4) = 14.1
    losses = distinct_losses(20)
    hits = np.zeros(20, int)
    for seed in range(800):
        hits[_drawn(losses, 8, ratio, seed)] += 1
    high = int(8 * ratio)
    top = sorted(highest(losses, high))
    others = np.setdiff1d(np.arange(20), top)
    assert (hits[top] == 800).all()
    assert (abs(hits[others] - 800 * (8 - high) / (20 - high)) < 70).all()


# the samplers


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
        workers(num_fast, num_slow),
        (fast_samples,) * num_fast + (slow_samples,) * num_slow,
        samples_before,
    )


def _fast_and_slow(
    table: LossTable, sampler: Sampler | None = None, **changes: int
) -> tuple[list[int], list[int]]:
    sampler = sampler or SeparatedSampler()
    fast, slow = sampler.sample_lists(_request(**changes), table)
    assert fast.indices.dtype == slow.indices.dtype == np.int32
    return fast.indices.tolist(), slow.indices.tolist()


def test_samples_of_all_samplers_are_these_for_ever() -> None:
    """So that a run of an earlier version can be repeated to the bit."""
    rng = np.random.default_rng(1)
    losses = rng.integers(0, 9, 5000).astype(np.float32)
    losses[rng.random(5000) < 0.1] = np.inf
    table = table_of(losses)
    digest = hashlib.sha256()
    for epoch, (fast, slow) in enumerate([(500, 300), (1500, 700), (3000, 900)], start=1):
        request = _request(
            fast_samples=fast,
            slow_samples=slow,
            seed=7,
            epoch=epoch,
            samples_before=4321 * (epoch - 1),
        )
        for sampler in (
            UniformSampler(),
            SeparatedSampler(0.5),
            SeparatedSampler(0.3, "slow"),
            UnifiedSampler(0.5),
            UnifiedSampler(0.7, "slow"),
        ):
            for sample_list in sampler.sample_lists(request, table):
                digest.update(sample_list.indices.astype("<i4").tobytes())
    assert digest.hexdigest() == "005e036a0293faf3bab6ae3489838e800581d7d77a063985c0e2b2d75e538386"


@pytest.mark.parametrize(
    ("sampler", "members"),
    [
        (UniformSampler(), [(0, 1, 2, 3, 4)]),
        (SeparatedSampler(), [(0, 1, 2), (3, 4)]),
        (SeparatedSampler(0.5, "slow"), [(0, 1, 2), (3, 4)]),
        (UnifiedSampler(), [(0, 1, 2), (3, 4)]),
        (UnifiedSampler(0.5, "slow"), [(0, 1, 2), (3, 4)]),
    ],
)
def test_lists_are_the_tiers_in_worker_order(
    sampler: Sampler, members: list[tuple[int, ...]]
) -> None:
    table, request = table_of(distinct_losses(500)), _request(3, 2)
    lists = sampler.sample_lists(request, table)
    assert [one.members for one in lists] == members
    assert [len(one.indices) for one in lists] == [request.set_size(m) for m in members]
    assert table.losses.tolist() == distinct_losses(500).tolist()
    # At the start a missing tier is refused; one that is lost in mid-run is not.
    assert sampler.needs_both_tiers is (len(members) == 2)
    for one_tier in (_request(2, 0), _request(0, 2)):
        assert [one.members for one in sampler.sample_lists(one_tier, table)] == [(0, 1)]


@pytest.mark.parametrize("make", [SeparatedSampler, UnifiedSampler])
def test_high_loss_settings_default_and_range(make: type[SeparatedSampler]) -> None:
    assert (make().high_loss_ratio, make().high_loss_to) == (0.5, "fast")
    for ratio in (-0.01, 1.01, math.nan, math.inf):
        with pytest.raises(ValueError, match="high_loss_ratio"):
            make(ratio)
    with pytest.raises(ValueError, match="high_loss_to = 'both'"):
        make(0.5, "both")  # type: ignore[arg-type]


def test_uniform_sampler_reads_the_stream_and_no_losses() -> None:
    request = _request(2, 1, rounds=3, samples_before=17, seed=5)
    for table in (LossTable(90), table_of(distinct_losses(90))):
        (everybody,) = UniformSampler().sample_lists(request, table)
        # 3 * (20 + 20 + 10) = 150 samples, the 18th of the stream is the first
        assert everybody.indices.tolist() == permutation_stream(5, 90, 17, 150).tolist()


@pytest.mark.parametrize("to", ["fast", "slow"])
def test_separated_sampler_worked(to: TierName) -> None:
    """N_F = 80 and N_S = 20 of 200: one of them is half by loss, the other uniform."""
    losses = distinct_losses(200)
    fast, slow = _fast_and_slow(table_of(losses), SeparatedSampler(0.5, to))
    assert (len(set(fast)), len(set(slow))) == (len(fast), len(slow)) == (80, 20)
    by_loss, uniform, size = (fast, slow, 80) if to == "fast" else (slow, fast, 20)
    top = highest(losses, size // 2)
    assert top <= set(by_loss)
    assert not top <= set(uniform)
    # the other half is no choice by loss, or none would lie outside the highest
    assert len(set(by_loss) - highest(losses, size)) > size / 8
    # with lambda 1 it is all by loss
    lists = _fast_and_slow(table_of(losses), SeparatedSampler(1.0, to))
    assert set(lists[to == "slow"]) == highest(losses, size)
    # the uniform tier's draw depends on neither losses nor lambda
    for table in (table_of(losses), LossTable(200)):
        for ratio in (0.0, 1.0):
            assert _fast_and_slow(table, SeparatedSampler(ratio, to))[to == "fast"] == uniform


def test_separated_sampler_unseen_are_picked_first() -> None:
    # 80 fast samples, 40 of them by loss: 30 unseen and the 10 highest of the seen 170
    losses = distinct_losses(200) * np.float32(1e30)
    losses[50:80] = math.inf
    fast, _ = _fast_and_slow(table_of(losses))
    assert set(range(50, 80)) <= set(fast)
    losses[50:80] = 0
    assert highest(losses, 10) <= set(fast)
    # more unseen than fit: another choice of them for each seed
    losses[:] = 1e30
    losses[60:] = math.inf
    one, other = (
        _fast_and_slow(table_of(losses), SeparatedSampler(1.0), seed=seed)[0] for seed in (0, 1)
    )
    assert min(one) >= 60
    assert set(one) != set(other)


@pytest.mark.parametrize("sampler", [SeparatedSampler(), UnifiedSampler()])
def test_draws_are_a_function_of_seed_epoch_and_losses(sampler: Sampler) -> None:
    table = table_of(np.arange(100) // 30)  # many ties
    draws = {
        (seed, epoch): _fast_and_slow(table, sampler, seed=seed, epoch=epoch)
        for seed in (0, 1)
        for epoch in (1, 2, 3)
    }
    for tier in (0, 1):
        assert len({tuple(lists[tier]) for lists in draws.values()}) == 6
    np.random.default_rng(0).random(5)
    assert _fast_and_slow(table, sampler, seed=1, epoch=2, samples_before=99) == draws[1, 2]


# unified: the second tier gets what the first one left


@pytest.mark.parametrize("to", ["fast", "slow"])
def test_unified_worked(to: TierName) -> None:
    """N = 100 = 80 + 20: the first tier takes its half by loss, the other takes all the rest."""
    losses = distinct_losses(100)
    fast, slow = _fast_and_slow(table_of(losses), UnifiedSampler(0.5, to))
    assert (len(fast), len(slow)) == (80, 20)
    assert sorted(fast + slow) == list(range(100))
    first = fast if to == "fast" else slow
    assert highest(losses, len(first) // 2) <= set(first)


def test_unified_rest_is_drawn_from_all_where_too_little_is_left() -> None:
    """N = 90: of the slow worker's 20, the 10 that are left come first, then 10 of all 90."""
    for seed in range(5):
        table = table_of(distinct_losses(90))
        fast, slow = _fast_and_slow(table, UnifiedSampler(), seed=seed)
        assert len(slow) == 20
        assert set(slow[:10]) == set(range(90)) - set(fast)
        assert len(set(slow[10:])) == 10
    fast, slow = _fast_and_slow(table_of(distinct_losses(80)), UnifiedSampler())
    assert sorted(fast) == list(range(80))  # nothing is left at all
    assert len(set(slow)) == 20
