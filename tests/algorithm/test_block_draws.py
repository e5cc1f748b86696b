"""Draws and shuffles block by block have the law of numpy's own."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm import block_draws
from flower_blsgd.algorithm.block_draws import BLOCK_SAMPLES, blocks, share_out, shuffle_into

from .teams import QUICK, blocks_of


def _share_out(sizes: list[int], count: int, rng: np.random.Generator) -> list[int]:
    shares = share_out(np.array(sizes, np.int64), count, rng)
    assert shares.dtype == np.int64
    return shares.tolist()


def _shuffled(pieces: list[list[int]], rng: np.random.Generator) -> list[int]:
    sizes = np.array([len(piece) for piece in pieces])
    out = np.full(sizes.sum(), -1, np.int32)
    shuffle_into(out, (np.array(piece, np.int64) for piece in pieces), sizes, rng)
    return out.tolist()


def test_blocks_worked() -> None:
    with blocks_of(4):
        assert blocks(10) == [slice(0, 4), slice(4, 8), slice(8, 10)]
        assert blocks(8) == [slice(0, 4), slice(4, 8)]
        assert blocks(0) == []
    assert block_draws.BLOCK_SAMPLES == BLOCK_SAMPLES


# how many come from each block


def test_share_out_is_hypergeometric() -> None:
    """Two of 3 + 2 + 1: the chances are (3 over a)(2 over b)(1 over c) / 15."""
    rng = np.random.default_rng(0)
    found = Counter(tuple(_share_out([3, 2, 1], 2, rng)) for _ in range(3000))
    expected = {
        (2, 0, 0): 600,  # 3 / 15
        (1, 1, 0): 1200,  # 6 / 15
        (1, 0, 1): 600,
        (0, 2, 0): 200,
        (0, 1, 1): 400,
    }
    assert set(found) == set(expected)
    # the widest standard deviation is sqrt(3000 x 0.4 x 0.6) = 27
    assert all(abs(found[shares] - expected[shares]) < 5 * 27 for shares in expected)


def test_share_out_variance_is_that_without_replacement() -> None:
    """10,000 of 20,000, four equal blocks: 10000 x 1/4 x 3/4 x (10000 / 19999) = 937.5."""
    rng = np.random.default_rng(1)
    first = [_share_out([5000] * 4, 10_000, rng)[0] for _ in range(4000)]
    assert np.mean(first) == pytest.approx(2500, abs=2.5)
    assert np.var(first) == pytest.approx(937.5, rel=0.12)


@QUICK
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_share_out_sums_to_the_count_and_takes_no_more_than_is_there(
    sizes: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, sum(sizes)))
    shares = _share_out(sizes, count, np.random.default_rng(data.draw(st.integers(0, 99))))
    assert sum(shares) == count
    assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))


def test_share_out_of_more_than_numpy_draws_from() -> None:
    sizes = [2**17] * 16_000  # 2.1 x 10^9
    with pytest.raises(ValueError, match="10"):
        np.random.default_rng(0).multivariate_hypergeometric(sizes, 10**9, method="marginals")
    shares = _share_out(sizes, 10**9, np.random.default_rng(0))
    assert sum(shares) == 10**9
    # 10^9 / 16000 = 62,500; standard deviation sqrt(62500 x (1 - 0.477)) = 181
    assert max(abs(share - 62_500) for share in shares) < 181 * 6


def test_share_out_of_one_block_draws_nothing() -> None:
    rng = np.random.default_rng(0)
    assert _share_out([7], 3, rng) == [3]
    assert rng.random() == np.random.default_rng(0).random()


# the order


@pytest.mark.parametrize("pieces", [[[0, 1, 2, 3]], [[0], [], [1, 2], [3]], [[0, 1], [2, 3]]])
@pytest.mark.parametrize("block", [1, 2, 3])
def test_shuffle_every_order_is_as_likely(pieces: list[list[int]], block: int) -> None:
    """4,800 shuffles of four: each of the 24 orders 200 times, standard deviation 13.8."""
    rng = np.random.default_rng(block)
    with blocks_of(block):
        found = Counter(tuple(_shuffled(pieces, rng)) for _ in range(4800))
    assert set(found) == set(itertools.permutations(range(4)))
    assert all(abs(count - 200) < 70 for count in found.values())
    # chi squared with 23 degrees of freedom: mean 23, standard deviation 6.8
    assert sum((count - 200) ** 2 / 200 for count in found.values()) < 23 + 5 * 6.8


def test_shuffle_neighbours_do_not_stay_together() -> None:
    """Of 999 pairs of neighbours 2 stay neighbours, in any order, on average."""
    rng = np.random.default_rng(0)
    kept, moved = 0, np.zeros(1000)
    with blocks_of(32):
        for _ in range(300):
            found = np.array(_shuffled([list(range(i, i + 25)) for i in range(0, 1000, 25)], rng))
            kept += int(np.count_nonzero(abs(np.diff(found)) == 1))
            moved += found
    assert abs(kept / 300 - 2) < 0.5  # standard deviation sqrt(2 / 300) = 0.08
    # mean index at each place: 499.5, standard deviation 288.7 / sqrt(300) = 16.7
    assert abs(moved / 300 - 499.5).max() < 16.7 * 5


@QUICK
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 9), st.integers(0, 99))
def test_shuffle_keeps_every_element_and_is_a_function_of_the_generator(
    sizes: list[int], block: int, seed: int
) -> None:
    numbers = iter(range(1000))
    pieces = [list(itertools.islice(numbers, size)) for size in sizes]
    with blocks_of(block):
        found = _shuffled(pieces, np.random.default_rng(seed))
        assert found == _shuffled(pieces, np.random.default_rng(seed))
    assert sorted(found) == list(range(sum(sizes)))


def test_shuffle_of_what_fits_one_block_is_numpys_own() -> None:
    expected = np.arange(1000, dtype=np.int32)
    np.random.default_rng(5).shuffle(expected)
    pieces = [list(range(400)), list(range(400, 1000))]
    assert _shuffled(pieces, np.random.default_rng(5)) == expected.tolist()


def test_shuffle_of_a_million_is_uniform_from_piece_to_place() -> None:
    """Of each of eight pieces an eighth lies in each eighth of the result."""
    size = 8 * BLOCK_SAMPLES
    out = np.empty(size, np.int32)
    pieces = (np.arange(start, start + BLOCK_SAMPLES) for start in range(0, size, BLOCK_SAMPLES))
    shuffle_into(out, pieces, np.full(8, BLOCK_SAMPLES), np.random.default_rng(2))
    seen = np.zeros(size, np.bool_)
    seen[out] = True
    assert seen.all()
    place, piece = np.arange(size) // BLOCK_SAMPLES, out // BLOCK_SAMPLES
    together = np.bincount(place * 8 + piece, minlength=64)
    # 2^17 / 8 = 16,384; standard deviation sqrt(16384) x 7/8 = 112
    assert abs(together - BLOCK_SAMPLES / 8).max() < 112 * 5
    # within a place too: the order tells nothing of the index
    assert abs(np.corrcoef(out, np.arange(size))[0, 1]) < 5 / math.sqrt(size)
