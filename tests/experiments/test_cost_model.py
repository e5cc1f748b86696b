"""What is expected of a run, worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.averaging import EqualWeighting, LoadWeighting
from flower_blsgd.algorithm.epoch_plan import RoundShape
from flower_blsgd.experiments.cost_model import Prediction, Speed, ceiling, predict


def test_two_workers_worked() -> None:
    """4 steps of 0.5 s beside 1 step of 1.5 s, and 0.5 s of overhead."""
    speeds = [Speed(0.5, True), Speed(1.5, False)]
    found = predict(
        speeds,
        RoundShape((4, 1), (8, 8)),
        LoadWeighting(),
        batch_size=8,
        rounds_per_epoch=10.0,
        overhead_seconds=0.5,
    )
    assert found == Prediction(
        local_steps=(4, 1),
        batch_sizes=(8, 8),
        loads=(4.0, 1.0),
        weights=(0.8, 0.2),
        waiting_shares=(0.0, 0.2),  # 2 s and 1.5 s of a round of 2.5 s
        rounds_per_epoch=10.0,
        round_seconds=2.5,
        epoch_seconds=25.0,
        fast_waiting_share=0.0,
        slow_waiting_share=0.2,
        samples_per_second=16.0,  # 40 samples in 2.5 s
    )


def test_smaller_batch_takes_its_share_of_a_step() -> None:
    """A step of half the batch takes half as long, and counts half."""
    speeds = [Speed(1.0, True), Speed(6.0, False)]
    shape = RoundShape((3, 1), (8, 4))
    found = predict(speeds, shape, LoadWeighting(), batch_size=8, rounds_per_epoch=1.0)
    assert found.loads == (3.0, 0.5)
    assert found.round_seconds == 3.0
    assert found.waiting_shares == (0.0, 0.0)
    assert found.weights == pytest.approx((6 / 7, 1 / 7))


def test_paper_setting_worked() -> None:
    """8 + 2 workers at (32, 1), the slow ones 22 times slower: 32 s against 22 s."""
    speeds = [Speed(1.0, True)] * 8 + [Speed(22.0, False)] * 2
    shape = RoundShape((32,) * 8 + (1,) * 2, (32,) * 10)
    found = predict(speeds, shape, LoadWeighting(), batch_size=32, rounds_per_epoch=50_000 / 8256)
    assert found.round_seconds == 32.0
    assert found.fast_waiting_share == 0.0
    assert found.slow_waiting_share == pytest.approx(10 / 32)
    assert found.epoch_seconds == pytest.approx(193.8, abs=0.01)
    assert found.samples_per_second == 8256 / 32
    # Synchronous: the fast ones wait 21 of 22 s, for 320 samples.
    sync = predict(
        speeds, RoundShape((1,) * 10, (32,) * 10), EqualWeighting(), batch_size=32,
        rounds_per_epoch=50_000 / 320,
    )  # fmt: skip
    assert sync.fast_waiting_share == pytest.approx(21 / 22)
    assert sync.epoch_seconds == pytest.approx(3437.5)
    assert sync.weights == (0.1,) * 10


def test_team_of_one_tier_has_no_share_of_the_other() -> None:
    shape = RoundShape((2, 1), (4, 4))
    speeds = [Speed(1.0, True), Speed(1.0, True)]
    found = predict(speeds, shape, EqualWeighting(), batch_size=4, rounds_per_epoch=1.0)
    assert found.slow_waiting_share is None
    assert found.fast_waiting_share == 0.25  # (0 + 1/2) / 2


def test_as_many_speeds_as_workers() -> None:
    with pytest.raises(ValueError, match="zip"):
        predict(
            [Speed(1.0, True)],
            RoundShape((1, 1), (2, 2)),
            EqualWeighting(),
            batch_size=2,
            rounds_per_epoch=1.0,
        )


def test_ceiling_of_the_paper_is_1_011() -> None:
    """8 cards and 2 CPUs that are 22 times slower: (8 + 2 / 22) / 8 = 1.01136."""
    team = [Speed(1.0, True)] * 8 + [Speed(22.0, False)] * 2
    assert ceiling(team) == pytest.approx(1.011, abs=5e-4)
    assert ceiling(team) == pytest.approx(89 / 88)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([Speed(0.5, True)], 1.0),
        ([Speed(0.5, True), Speed(0.5, False)], 2.0),
        ([Speed(1.0, True), Speed(4.0, False), Speed(4.0, False)], 1.5),
        ([Speed(1.0, False)], None),
        ([], None),
    ],
)
def test_ceiling_worked(speeds: list[Speed], expected: float | None) -> None:
    assert ceiling(speeds) == expected


@given(
    st.lists(
        st.tuples(st.floats(0.001, 100), st.booleans(), st.integers(1, 64), st.integers(2, 64)),
        min_size=1,
        max_size=8,
    ),
    st.floats(0, 10),
)
def test_nobody_gets_more_out_than_there_is(
    team: list[tuple[float, bool, int, int]], overhead: float
) -> None:
    speeds = [Speed(seconds, fast) for seconds, fast, _, _ in team]
    shape = RoundShape(tuple(row[2] for row in team), tuple(row[3] for row in team))
    found = predict(
        speeds,
        shape,
        LoadWeighting(),
        batch_size=16,
        rounds_per_epoch=3.0,
        overhead_seconds=overhead,
    )
    assert found.epoch_seconds == pytest.approx(3 * found.round_seconds)
    assert sum(found.weights) == pytest.approx(1.0)
    assert all(0 <= share <= 1 for share in found.waiting_shares)
    if overhead == 0:
        assert min(found.waiting_shares) == 0.0  # somebody is the last
    for speed, load, share in zip(speeds, found.loads, found.waiting_shares, strict=True):
        computing = load * speed.seconds_per_step
        assert computing + share * found.round_seconds + overhead == pytest.approx(
            found.round_seconds
        )
    whole = sum(16 / speed.seconds_per_step for speed in speeds)
    assert found.samples_per_second <= whole * (1 + 1e-9)
    most = ceiling(speeds)
    if most is not None:
        fast = sum(16 / speed.seconds_per_step for speed in speeds if speed.fast)
        assert whole == pytest.approx(most * fast)
