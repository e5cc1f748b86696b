import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.loss_table import highest_losses
from flower_blsgd.algorithm.sample_draws import (
    count_marked,
    draw_samples,
    mark,
    permutation_stream,
    shuffled_marked,
)

from .teams import QUICK, blocks_of, distinct_losses

_ONE_BLOCK = 2**17
_some_blocks = st.sampled_from([1, 4, 7, _ONE_BLOCK])
"""The same holds however many blocks there are."""


def _drawn(losses: object, count: int, ratio: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return draw_samples(np.asarray(losses, np.float32), count, ratio, rng)


def _highest(losses: np.ndarray, count: int) -> set[int]:
    return set(np.argsort(-losses)[:count].tolist())


# the uniform stream


@QUICK
@given(
    st.integers(0, 99), st.integers(1, 40), st.integers(0, 200), st.integers(0, 120), _some_blocks
)
def test_permutation_stream_is_one_stream_of_permutations(
    seed: int, num_samples: int, start: int, count: int, block: int
) -> None:
    with blocks_of(block):
        whole = permutation_stream(seed, num_samples, 0, start + count)
        piece = permutation_stream(seed, num_samples, start, count)
    assert piece.dtype == np.int32
    assert piece.tolist() == whole[start:].tolist()
    for begin in range(0, len(whole) - num_samples + 1, num_samples):
        assert sorted(whole[begin : begin + num_samples]) == list(range(num_samples))
    rest = whole[len(whole) // num_samples * num_samples :]
    assert len(set(rest.tolist())) == len(rest)


def test_permutation_stream_every_permutation_is_another() -> None:
    blocks = permutation_stream(0, 50, 0, 50 * 20).reshape(20, 50)
    assert len({tuple(block) for block in blocks.tolist()}) == 20
    assert permutation_stream(1, 50, 0, 50).tolist() != blocks[0].tolist()


def test_permutation_stream_first_place_is_uniform() -> None:
    # 1,000 permutations of 5 samples: each first 200 times, standard deviation 12.6
    first = permutation_stream(3, 5, 0, 5000).reshape(-1, 5)[:, 0]
    assert (abs(np.bincount(first, minlength=5) - 200) < 64).all()


# one draw


@QUICK
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3e38, math.inf]), min_size=1, max_size=25),
    st.floats(0, 1),
    st.data(),
)
def test_draw_samples_lists(losses: list[float], ratio: float, data: st.DataObject) -> None:
    """No index twice within a list; all full lists but the last; the top of each is the top-k."""
    num_samples = len(losses)
    count = data.draw(st.integers(0, 3 * num_samples + 1))
    with blocks_of(data.draw(_some_blocks)):
        drawn = _drawn(losses, count, ratio, data.draw(st.integers(0, 99)))
    assert drawn.dtype == np.int32
    assert len(drawn) == count
    values = np.array(losses, np.float32)
    for start in range(0, count, num_samples):
        one = drawn[start : start + num_samples]
        assert len(np.unique(one)) == len(one)
        assert one.min() >= 0
        assert one.max() < num_samples
        top = math.floor(ratio * len(one) + 1e-9)
        chosen = np.sort(values[one])[::-1][:top]
        assert chosen.tolist() == np.sort(values)[::-1][:top].tolist()


def test_draw_samples_all_by_loss_is_exactly_the_top() -> None:
    losses = distinct_losses(100)
    assert set(_drawn(losses, 30, 1.0).tolist()) == _highest(losses, 30)


def test_draw_samples_half_by_loss_worked() -> None:
    # 20 of 60: the 10 highest, and 10 of the other 50
    losses = distinct_losses(60)
    drawn = set(_drawn(losses, 20, 0.5).tolist())
    assert _highest(losses, 10) <= drawn
    assert len(drawn - _highest(losses, 10)) == 10


@pytest.mark.parametrize("block", [3, _ONE_BLOCK])
@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.75])
def test_draw_samples_rest_is_uniform_among_the_others(ratio: float, block: int) -> None:
    # 8 of 20 in 800 draws: the 8 * ratio highest always; each other in (8 - high) / (20 - high)
    # of them; the widest standard deviation is sqrt(800 / 4) = 14.1
    losses = distinct_losses(20)
    hits = np.zeros(20, int)
    for seed in range(800):
        with blocks_of(block):
            hits[_drawn(losses, 8, ratio, seed)] += 1
    high = int(8 * ratio)
    top = sorted(_highest(losses, high))
    others = np.setdiff1d(np.arange(20), top)
    assert (hits[top] == 800).all()
    assert (abs(hits[others] - 800 * (8 - high) / (20 - high)) < 70).all()


@pytest.mark.parametrize("block", [64, _ONE_BLOCK])
def test_draw_samples_order_tells_nothing_of_the_loss(block: int) -> None:
    """The union is shuffled: a quarter of the list has the same mix as the whole."""
    losses = distinct_losses(4000)
    with blocks_of(block):
        drawn = _drawn(losses, 2000, 0.5)
    high = np.isin(drawn, list(_highest(losses, 1000))).reshape(4, 500).sum(axis=1)
    # hypergeometric: 250 of 500, standard deviation sqrt(500 / 4 * 0.75) = 9.7
    assert (abs(high - 250) < 45).all()
    # nor of the index: of the first 1,000 drawn about half lie above the median
    assert abs((drawn[:1000] >= 2000).sum() - 500) < 75


def test_draw_samples_of_all_is_shuffled() -> None:
    drawn = _drawn(distinct_losses(200), 200, 0.5)
    assert sorted(drawn.tolist()) == list(range(200))
    assert abs(np.corrcoef(drawn, np.arange(200))[0, 1]) < 0.3
    assert drawn.tolist() != _drawn(distinct_losses(200), 200, 0.5, seed=1).tolist()


def test_draw_samples_excess_is_chosen_by_the_same_rule() -> None:
    # 130 of 100: all shuffled, then 30 more: the 15 highest and 15 others, shuffled together
    losses = distinct_losses(100)
    drawn = _drawn(losses, 130, 0.5)
    assert sorted(drawn[:100].tolist()) == list(range(100))
    excess = drawn[100:]
    assert len(set(excess.tolist())) == 30
    assert _highest(losses, 15) <= set(excess.tolist())
    assert not set(excess[:15].tolist()) <= _highest(losses, 15)
    assert not set(excess.tolist()) <= _highest(losses, 30)


def test_draw_samples_leaves_the_losses_as_they_were() -> None:
    losses = distinct_losses(50)
    _drawn(losses, 70, 0.5)
    assert losses.tolist() == distinct_losses(50).tolist()


def test_draw_samples_of_one_block_is_numpys_own() -> None:
    """As it was before there were blocks: marks, then a choice among the others, then a shuffle."""
    losses = np.random.default_rng(1).integers(0, 9, 5000).astype(np.float32)
    rng = np.random.default_rng(2)
    high = highest_losses(losses, 1000, rng)
    others = np.flatnonzero(~high)
    rest = rng.choice(others, 3000, replace=False, shuffle=False)
    expected = np.concatenate([np.flatnonzero(high), rest])
    rng.shuffle(expected)
    assert _drawn(losses, 4000, 0.25, 2).tolist() == expected.tolist()


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_draw_samples_of_many_blocks(ratio: float) -> None:
    losses = distinct_losses(3 * _ONE_BLOCK + 5)
    drawn = _drawn(losses, 2 * _ONE_BLOCK, ratio)
    assert len(np.unique(drawn)) == len(drawn)
    high = losses[drawn] >= len(losses) - ratio * 2 * _ONE_BLOCK
    assert np.count_nonzero(high) == ratio * 2 * _ONE_BLOCK
    # the rest: of the other half as many low as high indices; standard deviation below 256
    rest = drawn[~high]
    assert abs(np.count_nonzero(rest < len(losses) / 2) - len(rest) / 2) < 256 * 5


# marks


def test_marks_worked() -> None:
    marked = np.zeros(10, np.bool_)
    with blocks_of(4):
        mark(marked, np.array([9, 2, 3, 2, 8, 5], np.int32))
        assert np.flatnonzero(marked).tolist() == [2, 3, 5, 8, 9]
        assert count_marked(marked).tolist() == [2, 1, 2]  # [0, 4), [4, 8), [8, 10)
        shuffled = shuffled_marked(marked, np.random.default_rng(0))
    assert shuffled.dtype == np.int32
    assert sorted(shuffled.tolist()) == [2, 3, 5, 8, 9]


def test_shuffled_marked_of_nothing_is_empty() -> None:
    assert len(shuffled_marked(np.zeros(5, np.bool_), np.random.default_rng(0))) == 0
