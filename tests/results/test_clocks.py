"""A round as it was measured, and as if each worker had a device of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.results.clocks import (
    BudgetClock,
    ClockSums,
    RoundTimes,
    device_times,
    wall_times,
)
from flower_blsgd.round_log import split_times

from .records import record, row, two_rounds


def test_wall_times_are_the_measured_ones() -> None:
    first, second = two_rounds()
    assert wall_times(first) == RoundTimes(10.0, {0: 3.0, 1: 5.0, 2: 0.0})
    assert wall_times(second) == RoundTimes(6.0, {0: 0.0, 1: 0.0, 2: 1.0})


def test_device_times_of_workers_in_a_queue() -> None:
    """Four workers take turns on one core: 8 s of computing, of which each alone needs 2 s."""
    rows = [
        row(i, completed_steps=4, start_seconds=0.5 + 2 * i, compute_seconds=2.0) for i in range(4)
    ]
    one = record(*rows, round_seconds=9.25, averaging_seconds=0.25)
    # Moved: 0.5 s before the first and 0.5 s after the last; then 0.25 s of averaging.
    assert device_times(one, dict.fromkeys(range(4), 0.5)) == RoundTimes(
        2.0 + 1.25, {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}
    )


def test_device_times_of_a_pause_in_the_queue_count_as_computing() -> None:
    rows = [
        row(0, completed_steps=1, start_seconds=1.0, compute_seconds=2.0),
        row(1, completed_steps=1, start_seconds=5.0, compute_seconds=2.0),
    ]
    times = device_times(record(*rows, round_seconds=8.0), {0: 2.0, 1: 3.0})
    assert times == RoundTimes(3.0 + 2.0, {0: 1.0, 1: 0.0})


def test_device_times_follow_completed_steps() -> None:
    """One that stopped at its deadline after 2 of 4 steps counts those."""
    rows = [
        row(0, completed_steps=2, compute_seconds=4.0),
        row(1, completed_steps=4, compute_seconds=2.0),
    ]
    times = device_times(record(*rows, round_seconds=4.0), {0: 2.0, 1: 0.5})
    assert times == RoundTimes(4.0, {0: 0.0, 1: 2.0})


@pytest.mark.parametrize(
    ("steps", "compute", "speed"),
    [(4, 2.0, 0.0), (4, 2.0, -1.0), (4, 2.0, float("nan")), (4, 0.0, 0.5), (0, 0.0, 0.5)],
    ids=["speed 0", "speed below 0", "speed not a number", "no times", "nobody did a step"],
)
def test_device_times_unknown(steps: int, compute: float, speed: float) -> None:
    one = record(row(0, completed_steps=steps, compute_seconds=compute))
    assert device_times(one, {0: speed}) is None


def test_device_times_of_an_unnamed_worker_are_unknown() -> None:
    assert device_times(record(row(0, completed_steps=4, compute_seconds=2.0)), {1: 1.0}) is None


def test_clock_sums() -> None:
    sums = ClockSums()
    for one in two_rounds():
        sums.add(one, wall_times(one))
    assert sums == ClockSums(16.0, 3.0, {True: 8.0, False: 1.0})


def test_budget_clock_counts_planning_and_rounds_on_the_wall() -> None:
    clock = BudgetClock("wall")
    one = record(row(0), planning_seconds=0.5, round_seconds=2.0)
    assert [clock.seconds_of(one, {0: 9.0}) for _ in range(2)] == [2.5, 2.5]


def test_budget_clock_counts_device_seconds_up_to_the_first_that_are_unknown() -> None:
    clock = BudgetClock("device")
    one = record(
        row(0, completed_steps=4, compute_seconds=2.0), planning_seconds=0.5, round_seconds=2.25
    )
    seconds = [clock.seconds_of(one, speeds) for speeds in ({0: 1.0}, {0: 2.0}, {}, {0: 1.0})]
    assert seconds == [4.25, 8.25, 2.75, 2.75]


spans = st.lists(
    st.tuples(st.floats(0, 5), st.floats(0.01, 5), st.integers(1, 8), st.floats(0.01, 2)),
    min_size=1,
    max_size=5,
)


@given(spans, st.floats(0, 1), st.floats(0, 1))
def test_device_times_properties(
    workers: list[tuple[float, float, int, float]], after: float, averaging: float
) -> None:
    """Where every device is alone in truth, both clocks agree; the last one waits for nobody."""
    computing = {i: (start, start + length) for i, (start, length, _, _) in enumerate(workers)}
    end = max(end for _, end in computing.values()) + after
    measured = split_times(0.0, end, computing)
    rows = [
        row(
            i,
            completed_steps=steps,
            start_seconds=measured[i].start,
            compute_seconds=measured[i].compute,
            waiting_seconds=measured[i].waiting,
        )
        for i, (_, _, steps, _) in enumerate(workers)
    ]
    one = record(*rows, round_seconds=end + averaging, averaging_seconds=averaging)
    speeds = {i: speed for i, (_, _, _, speed) in enumerate(workers)}
    times = device_times(one, speeds)
    assert times is not None
    assert min(times.waiting_seconds.values()) == 0.0
    longest = max(steps * speed for _, _, steps, speed in workers)
    assert times.round_seconds >= longest
    if len({start for start, *_ in workers}) == 1:  # they began at once
        true_speeds = {i: measured[i].compute / steps for i, (_, _, steps, _) in enumerate(workers)}
        same = device_times(one, true_speeds)
        assert same is not None
        assert same.round_seconds == pytest.approx(one.round_seconds)
        assert same.waiting_seconds == pytest.approx(wall_times(one).waiting_seconds, abs=1e-9)
