import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.loss_table import LossTable, highest_losses

from .teams import QUICK, blocks_of


def _record(table: LossTable, indices: list[int], losses: list[float], server_round: int) -> None:
    table.record(np.array(indices, np.int32), np.array(losses, np.float32), server_round)


def _marked(losses: list[float], count: int, seed: int = 0) -> np.ndarray:
    return highest_losses(np.array(losses, np.float32), count, np.random.default_rng(seed))


_losses = st.lists(
    # few values, so that ties are common; infinity is a sample that was never seen
    st.sampled_from([0.0, -0.0, 0.25, 1.0, 1e-30, 7.5, 3.4e38, math.inf]),
    min_size=1,
    max_size=30,
)


def test_loss_table_starts_unseen() -> None:
    table = LossTable(4)
    assert len(table) == 4
    assert (table.losses > np.finfo(np.float32).max).all()
    assert table.losses.dtype == np.float32
    assert table.rounds.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("num_samples", [0, -1])
def test_loss_table_without_samples_refused(num_samples: int) -> None:
    with pytest.raises(ValueError, match="num_samples"):
        LossTable(num_samples)


def test_record_writes_losses_and_rounds_of_the_named_samples_only() -> None:
    table = LossTable(5)
    _record(table, [3, 1], [0.5, 2.0], 7)
    assert table.losses.tolist() == [math.inf, 2.0, math.inf, 0.5, math.inf]
    assert table.rounds.tolist() == [0, 7, 0, 7, 0]


def test_record_replaces_the_older_loss() -> None:
    table = LossTable(2)
    _record(table, [0, 1], [3.0, 4.0], 1)
    _record(table, [1], [0.5], 2)
    assert table.losses.tolist() == [3.0, 0.5]
    assert table.rounds.tolist() == [1, 2]


def test_record_in_descending_worker_order_lets_the_lowest_index_win() -> None:
    table = LossTable(3)
    of_worker = {0: ([0, 1], [1.0, 1.5]), 1: ([1, 2], [2.0, 2.5]), 2: ([2, 0], [3.0, 3.5])}
    for worker in sorted(of_worker, reverse=True):
        _record(table, *of_worker[worker], 1)
    assert table.losses.tolist() == [1.0, 1.5, 2.5]


def test_record_twice_in_one_order_keeps_the_later_loss() -> None:
    table = LossTable(2)
    _record(table, [0, 1, 0], [5.0, 1.0, 0.25], 1)
    assert table.losses.tolist() == [0.25, 1.0]


def test_record_leaves_out_what_is_not_finite() -> None:
    table = LossTable(4)
    _record(table, [0, 1, 2, 3], [1.0, 1.0, 1.0, 1.0], 1)
    _record(table, [0, 1, 2, 3], [math.nan, math.inf, -math.inf, 2.0], 2)
    assert table.losses.tolist() == [1.0, 1.0, 1.0, 2.0]
    assert table.rounds.tolist() == [1, 1, 1, 2]


def test_record_of_nothing_changes_nothing() -> None:
    table = LossTable(2)
    _record(table, [], [], 3)
    assert table.rounds.tolist() == [0, 0]


def test_mean_age_counts_recorded_losses_only() -> None:
    table = LossTable(10)
    _record(table, [0, 1], [1.0, 1.0], 2)
    _record(table, [2], [1.0], 5)
    # ages at round 6: 4, 4, 1; the seven unseen do not count: 9 / 3 = 3
    assert table.mean_age_rounds(6) == pytest.approx(3.0)


def test_mean_age_without_any_record_is_nan() -> None:
    assert math.isnan(LossTable(3).mean_age_rounds(4))


def test_highest_losses_worked() -> None:
    assert np.flatnonzero(_marked([0.1, 5.0, 3.0, 4.0, 0.2], 2)).tolist() == [1, 3]
    assert np.flatnonzero(_marked([0.1, 5.0, 3.0, 4.0, 0.2], 3)).tolist() == [1, 2, 3]


def test_highest_losses_none_and_all() -> None:
    assert _marked([1.0, 2.0, 2.0], 0).tolist() == [False] * 3
    assert _marked([1.0, 2.0, 2.0], 3).tolist() == [True] * 3


@pytest.mark.parametrize("count", [-1, 4])
def test_highest_losses_impossible_count_refused(count: int) -> None:
    with pytest.raises(ValueError, match="count"):
        _marked([1.0, 2.0, 3.0], count)


def test_highest_losses_unseen_rank_above_every_number() -> None:
    largest = float(np.finfo(np.float32).max)
    assert np.flatnonzero(_marked([largest, math.inf, largest, math.inf], 2)).tolist() == [1, 3]


@QUICK
@given(_losses, st.data())
def test_highest_losses_is_top_k(losses: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(losses)))
    before = np.array(losses, np.float32)
    with blocks_of(data.draw(st.sampled_from([1, 4, 100]))):
        marked = _marked(losses, count, data.draw(st.integers(0, 99)))
    assert marked.dtype == np.bool_
    assert marked.shape == before.shape
    assert np.count_nonzero(marked) == count
    if 0 < count < len(losses):
        assert before[marked].min() >= before[~marked].max()


def test_highest_losses_leaves_the_table_as_it_was() -> None:
    losses = np.array([3.0, 1.0, 2.0, 1.0, 9.0], np.float32)
    highest_losses(losses, 3, np.random.default_rng(0))
    assert losses.tolist() == [3.0, 1.0, 2.0, 1.0, 9.0]


@pytest.mark.parametrize("block", [1, 3, 100])
def test_highest_losses_ties_every_tied_sample_is_as_likely(block: int) -> None:
    # 9.0 is always in; 2 more out of five tied ones: each in 2/5 of 1,000 draws = 400,
    # standard deviation sqrt(1000 * 0.4 * 0.6) = 15.5; the seeds are fixed
    losses = [1.0, 2.0, 2.0, 9.0, 2.0, 2.0, 2.0]
    with blocks_of(block):
        hits = sum(_marked(losses, 3, seed).astype(int) for seed in range(1000))
    assert hits[0] == 0
    assert hits[3] == 1000
    tied = hits[[1, 2, 4, 5, 6]]
    assert tied.sum() == 2000
    assert (abs(tied - 400) < 78).all()


def test_highest_losses_ties_are_a_function_of_the_generator() -> None:
    losses = [1.0] * 40
    assert (_marked(losses, 20, 3) == _marked(losses, 20, 3)).all()
    assert (_marked(losses, 20, 3) != _marked(losses, 20, 4)).any()
