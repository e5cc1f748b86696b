"""Who waited for whom in a round (ALGORITHM section 7)."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.round_log import RoundRecord, TimeShare, WorkerRound, split_times


def test_split_times_hand_worked() -> None:
    """Orders sent at 100, last reply at 110; the last worker ends computing at 109."""
    shares = split_times(100.0, 110.0, {0: (101.0, 109.0), 1: (102.0, 105.0), 2: (100.5, 107.0)})
    assert shares == {
        # start, compute, waiting for the end at 109, transfer = start + (110 - 109)
        0: TimeShare(1.0, 8.0, 0.0, 2.0),
        1: TimeShare(2.0, 3.0, 4.0, 3.0),
        2: TimeShare(0.5, 6.5, 2.0, 1.5),
    }


def test_split_times_one_worker_never_waits() -> None:
    assert split_times(0.0, 4.0, {7: (1.0, 3.5)}) == {7: TimeShare(1.0, 2.5, 0.0, 1.5)}


def test_split_times_nobody_computed() -> None:
    assert split_times(0.0, 4.0, {}) == {}


def test_split_times_worker_without_a_step() -> None:
    """It is done at once, and waits for the other one all the time."""
    shares = split_times(0.0, 10.0, {0: (1.0, 9.0), 1: (1.0, 1.0)})
    assert shares[1] == TimeShare(1.0, 0.0, 8.0, 2.0)


@pytest.mark.parametrize(
    ("computing", "expected"),
    [
        # a clock that is slow: it seems to begin before the order
        ((-5.0, 6.0), TimeShare(0.0, 6.0, 0.0, 4.0)),
        # a clock that is fast: it seems to end after the reply
        ((3.0, 12.0), TimeShare(3.0, 7.0, 0.0, 3.0)),
        ((-5.0, 12.0), TimeShare(0.0, 10.0, 0.0, 0.0)),
        # all of it before, or after
        ((-9.0, -3.0), TimeShare(0.0, 0.0, 0.0, 10.0)),
        ((20.0, 25.0), TimeShare(10.0, 0.0, 0.0, 10.0)),
    ],
)
def test_split_times_moves_other_clocks_into_the_round(
    computing: tuple[float, float], expected: TimeShare
) -> None:
    assert split_times(0.0, 10.0, {0: computing}) == {0: expected}


def test_split_times_nobody_waits_for_a_clock_that_is_fast() -> None:
    shares = split_times(0.0, 10.0, {0: (1.0, 8.0), 1: (1.0, 500.0)})
    assert shares[0].waiting == 2.0


times = st.floats(-50.0, 150.0, allow_nan=False)
spans = st.tuples(times, times).map(lambda span: (min(span), max(span)))


@given(
    st.floats(-1e3, 1e3),
    st.floats(0.0, 1e3),
    st.dictionaries(st.integers(0, 9), spans, min_size=1, max_size=6),
)
def test_split_times_parts_add_up(
    sent_at: float, lasted: float, computing: dict[int, tuple[float, float]]
) -> None:
    received_at = sent_at + lasted
    computing = {w: (sent_at + a, sent_at + b) for w, (a, b) in computing.items()}
    shares = split_times(sent_at, received_at, computing)
    assert shares.keys() == computing.keys()
    for worker, share in shares.items():
        total = share.compute + share.waiting + share.transfer
        assert total == pytest.approx(received_at - sent_at, abs=1e-9)
        assert all(part >= 0 for part in dataclasses.astuple(share))
        assert share.start <= share.transfer + 1e-9
        start, end = computing[worker]
        assert share.compute <= end - start + 1e-9
    assert min(share.waiting for share in shares.values()) == 0
    # Who ends later waits less, by exactly the difference.
    ends = {w: share.start + share.compute for w, share in shares.items()}
    for worker, share in shares.items():
        assert share.waiting == pytest.approx(max(ends.values()) - ends[worker], abs=1e-9)


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 100.0)).map(
            lambda span: (min(span), max(span))
        ),
        max_size=6,
    ),
    st.floats(-1e6, 1e6),
)
def test_split_times_does_not_depend_on_the_epoch_of_the_clock(
    computing: dict[int, tuple[float, float]], shift: float
) -> None:
    moved = {w: (a + shift, b + shift) for w, (a, b) in computing.items()}
    here = split_times(0.0, 100.0, computing)
    there = split_times(shift, 100.0 + shift, moved)
    for worker, share in here.items():
        assert dataclasses.astuple(there[worker]) == pytest.approx(
            dataclasses.astuple(share), abs=1e-6
        )


def test_records_are_frozen() -> None:
    row = WorkerRound(worker=0, label="fast-0 (cpu:0)", fast=True, local_steps=3)
    record = RoundRecord(1, 1, 1, 1, 0.1, 0.0, 1.0, 0.0, 0, 0.5, (row,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.weight = 1.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.round = 2  # type: ignore[misc]


def test_worker_round_that_did_nothing() -> None:
    row = WorkerRound(worker=0, label="fast-0 (cpu:0)", fast=True, local_steps=3)
    assert (row.completed_steps, row.num_examples, row.weight, row.failure) == (0, 0, 0.0, "")
    assert row.loss != row.loss  # nan: no step, no loss
