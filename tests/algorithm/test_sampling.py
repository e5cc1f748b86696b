import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.randomness import derived_seed, generator
from flower_blsgd.algorithm.sampling import (
    EpochRequest,
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


# random draws


def _draw(*key: object) -> list[int]:
    return generator(*key).integers(0, 2**62, 4).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        (1, "order", 3, 2),
        (2**32, "order", 3, 2),  # a seed that needs more than 32 bits
        (0, "permutation", 3, 2),
        (0, "redro", 3, 2),  # the same letters
        (0, "order", 4, 2),
        (0, "order", 3, 1),
        (0, "order", 2, 3),  # the same counters in another order
        (0, "order", 3),
        (0, "order", 3, 2, 0),
    ],
)
def test_every_argument_counts(other: tuple[object, ...]) -> None:
    assert _draw(*other) != _draw(0, "order", 3, 2)
    assert derived_seed(*other) != derived_seed(0, "order", 3, 2)  # type: ignore[arg-type]


def test_derived_seed_fits_what_torch_takes_and_uses_all_63_bits() -> None:
    values = [derived_seed(2**63, "order", i) for i in range(200)]
    assert all(type(value) is int and 0 <= value < 2**63 for value in values)
    assert len(set(values)) == 200
    for bit in range(63):
        assert {value >> bit & 1 for value in values} == {0, 1}


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
    _record(table, [0, 1, 2, 4], [math.nan, math.inf, -math.inf, math.nan], 9)  # left out
    assert table.losses.tolist() == [math.inf, 0.25, math.inf, 0.5, math.inf]
    assert table.rounds.tolist() == [0, 8, 0, 7, 0]


def test_unseen_sample_ranks_at_the_median_after_two_failed_orders() -> None:
    """The recorded losses are 1, 2 and 9: the median is 2, also for one whose order failed."""
    table = LossTable(6)
    _record(table, [1, 2, 3], [1.0, 2.0, 9.0], 1)
    assert table.ranking_losses() is table.losses
    for indices in ([0, 1, 4], [0, 3], [0, 5]):  # sample 0 three times, 4 and 5 once
        table.record_failure(np.array(indices, np.int32))
    assert table.ranking_losses().tolist() == [2.0, 1.0, 2.0, 9.0, math.inf, math.inf]
    assert table.losses[0] == math.inf  # it was not seen
    part = table.subset(np.array([0, 1, 2, 4], np.int32))  # their median is 1.5
    assert part.ranking_losses().tolist() == [1.5, 1.0, 2.0, math.inf]
    _record(table, [0], [5.0], 2)
    assert table.ranking_losses().tolist() == [5.0, 1.0, 2.0, 9.0, math.inf, math.inf]


def test_sample_that_failed_twice_is_unseen_while_nothing_is_recorded() -> None:
    table = LossTable(3)
    for _ in range(2):
        table.record_failure(np.arange(2, dtype=np.int32))
    assert table.ranking_losses().tolist() == [math.inf] * 3
    _record(table, [2], [0.5], 1)
    assert table.ranking_losses().tolist() == [0.5] * 3


def test_mean_age_counts_recorded_losses_only() -> None:
    # ages at round 6: 4, 4, 1; the seven unseen do not count: 9 / 3 = 3
    table = table_of([1.0] * 3 + [math.inf] * 7, [2, 2, 5] + [0] * 7)
    assert table.mean_age_rounds(6) == pytest.approx(3.0)


# the highest losses


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


# the samplers


def request_of(
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


def fast_and_slow(
    table: LossTable, sampler: Sampler | None = None, **changes: int
) -> tuple[list[int], list[int]]:
    sampler = sampler or SeparatedSampler()
    fast, slow = sampler.sample_lists(request_of(**changes), table)
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
        request = request_of(
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
    table, request = table_of(distinct_losses(500)), request_of(3, 2)
    lists = sampler.sample_lists(request, table)
    assert [one.members for one in lists] == members
    assert [len(one.indices) for one in lists] == [request.set_size(m) for m in members]
    assert table.losses.tolist() == distinct_losses(500).tolist()
    # At the start a missing tier is refused; one that is lost in mid-run is not.
    assert sampler.needs_both_tiers is (len(members) == 2)
    for one_tier in (request_of(2, 0), request_of(0, 2)):
        assert [one.members for one in sampler.sample_lists(one_tier, table)] == [(0, 1)]


def test_high_loss_settings_default_and_range() -> None:
    assert SeparatedSampler() == SeparatedSampler(0.5, "fast")
    for ratio in (-0.01, 1.01, math.nan, math.inf):
        with pytest.raises(ValueError, match="high_loss_ratio"):
            UnifiedSampler(ratio)
    with pytest.raises(ValueError, match="high_loss_to = 'both'"):
        SeparatedSampler(0.5, "both")  # type: ignore[arg-type]


def test_uniform_sampler_reads_the_stream_and_no_losses() -> None:
    request = request_of(2, 1, rounds=3, samples_before=17, seed=5)
    for table in (LossTable(90), table_of(distinct_losses(90))):
        (everybody,) = UniformSampler().sample_lists(request, table)
        # 3 * (20 + 20 + 10) = 150 samples, the 18th of the stream is the first
        assert everybody.indices.tolist() == permutation_stream(5, 90, 17, 150).tolist()


@pytest.mark.parametrize("to", ["fast", "slow"])
def test_separated_sampler_worked(to: TierName) -> None:
    """N_F = 80 and N_S = 20 of 200: one of them is half by loss, the other uniform."""
    losses = distinct_losses(200)
    fast, slow = fast_and_slow(table_of(losses), SeparatedSampler(0.5, to))
    assert (len(set(fast)), len(set(slow))) == (len(fast), len(slow)) == (80, 20)
    by_loss, uniform, size = (fast, slow, 80) if to == "fast" else (slow, fast, 20)
    top = highest(losses, size // 2)
    assert top <= set(by_loss)
    assert not top <= set(uniform)
    # the other half is no choice by loss, or none would lie outside the highest
    assert len(set(by_loss) - highest(losses, size)) > size / 8
    # with lambda 1 it is all by loss
    lists = fast_and_slow(table_of(losses), SeparatedSampler(1.0, to))
    assert set(lists[to == "slow"]) == highest(losses, size)
    # the uniform tier's draw depends on neither losses nor lambda
    for table in (table_of(losses), LossTable(200)):
        for ratio in (0.0, 1.0):
            assert fast_and_slow(table, SeparatedSampler(ratio, to))[to == "fast"] == uniform


# unified: the second tier gets what the first one left


@pytest.mark.parametrize("to", ["fast", "slow"])
def test_unified_worked(to: TierName) -> None:
    """N = 100 = 80 + 20: the first tier takes its half by loss, the other takes all the rest."""
    losses = distinct_losses(100)
    fast, slow = fast_and_slow(table_of(losses), UnifiedSampler(0.5, to))
    assert (len(fast), len(slow)) == (80, 20)
    assert sorted(fast + slow) == list(range(100))
    first = fast if to == "fast" else slow
    assert highest(losses, len(first) // 2) <= set(first)


def test_unified_rest_is_drawn_from_all_where_too_little_is_left() -> None:
    """N = 90: of the slow worker's 20, the 10 that are left come first, then 10 of all 90."""
    for seed in range(5):
        table = table_of(distinct_losses(90))
        fast, slow = fast_and_slow(table, UnifiedSampler(), seed=seed)
        assert len(slow) == 20
        assert set(slow[:10]) == set(range(90)) - set(fast)
        assert len(set(slow[10:])) == 10
    fast, slow = fast_and_slow(table_of(distinct_losses(80)), UnifiedSampler())
    assert sorted(fast) == list(range(80))  # nothing is left at all
    assert len(set(slow)) == 20
