import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.local_steps import (
    FAST_SPEED_RATIO,
    BySpeedSteps,
    FixedSteps,
    Participant,
    SameSteps,
    SystemAwareSteps,
    batch_sizes_of,
    proportional_steps,
    shrunk_batch,
    shrunk_steps,
    speed_ratios,
)

from .teams import QUICK, team


@pytest.mark.parametrize(
    ("gamma", "tau_fast", "expected"),
    [
        (1.0, 32, 32),
        (0.5, 32, 16),
        (0.75, 8, 6),
        (0.046875, 32, 2),  # 1.5 + 0.5 = 2
        (0.046874, 32, 1),  # 1.499968 + 0.5 < 2
        (0.078125, 32, 3),  # 2.5 + 0.5 = 3: half goes up, not to even
        (0.001, 32, 1),  # floor(0.532) = 0, at least 1
        (0.2, 1, 1),
    ],
)
def test_proportional_steps_worked(gamma: float, tau_fast: int, expected: int) -> None:
    assert proportional_steps(gamma, tau_fast) == expected


@QUICK
@given(st.floats(0.001, 1.0), st.integers(1, 1000))
def test_proportional_steps_is_the_nearest_number_of_steps(gamma: float, tau_fast: int) -> None:
    steps = proportional_steps(gamma, tau_fast)
    assert isinstance(steps, int)
    assert 1 <= steps <= tau_fast
    assert steps == 1 or abs(steps - gamma * tau_fast) <= 0.5 + 1e-9


def test_speed_ratios_compare_with_the_fastest() -> None:
    # fastest 0.1 s: 0.1/0.2, 0.1/0.1, 0.1/0.4
    assert speed_ratios([0.2, 0.1, 0.4]) == pytest.approx([0.5, 1.0, 0.25])


def test_speed_ratios_unknown_stay_unknown() -> None:
    assert speed_ratios([None, 0.2, None, 0.1]) == [None, 0.5, None, 1.0]
    assert speed_ratios([None, None]) == [None, None]
    assert speed_ratios([]) == []


@QUICK
@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=8))
def test_speed_ratios_lie_in_0_to_1_and_the_fastest_has_1(seconds: list[float]) -> None:
    ratios = speed_ratios(seconds)
    assert ratios[seconds.index(min(seconds))] == 1.0
    assert all(0 < ratio <= 1 for ratio in ratios)


def test_fast_speed_ratio_is_the_specified_one() -> None:
    assert FAST_SPEED_RATIO == 0.7


def test_shrunk_steps_worked() -> None:
    # floor(32 * 22 / 32) = 22, floor(16 * 22 / 32) = 11, floor(5 * 22 / 32) = 3, floor(22/32) -> 1
    assert shrunk_steps([32, 16, 5, 1], 22) == [22, 11, 3, 1]


@QUICK
@given(st.lists(st.integers(1, 64), min_size=1, max_size=6), st.data())
def test_shrunk_steps_are_floors_of_at_least_one(steps: list[int], data: st.DataObject) -> None:
    longest = data.draw(st.integers(1, max(steps)))
    shrunk = shrunk_steps(steps, longest)
    for before, after in zip(steps, shrunk, strict=True):
        exact = before * longest / max(steps)
        assert after == 1 or exact - 1 < after <= exact
        assert after >= 1
    assert max(shrunk) == longest


def test_shrunk_steps_to_the_largest_changes_nothing() -> None:
    assert shrunk_steps([7, 3, 1], 7) == [7, 3, 1]


def test_same_steps_is_one_number_for_all_whatever_is_known_of_them() -> None:
    workers = [
        Participant(True, 32),
        Participant(False, 32, speed_ratio=0.1),
        Participant(False, 32, given_steps=5),  # steps= holds for system-aware only
    ]
    assert SameSteps(32).local_steps(workers) == [32, 32, 32]
    assert SameSteps(1).local_steps(workers) == [1, 1, 1]


def test_fixed_steps_are_returned_in_order() -> None:
    assert FixedSteps((4, 2, 3)).local_steps(team(1, 2)) == [4, 2, 3]


@pytest.mark.parametrize("steps", [(4, 2), (4, 2, 3, 1)])
def test_fixed_steps_for_another_number_of_workers_refused(steps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{len(steps)} workers, but 3"):
        FixedSteps(steps).local_steps(team(1, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SameSteps(0),
        lambda: FixedSteps((3, 0)),
        lambda: SystemAwareSteps(0),
        lambda: SystemAwareSteps(32, 0),
        lambda: SystemAwareSteps(32, -1),
        lambda: BySpeedSteps(0),
    ],
)
def test_step_policy_below_one_step_refused(make: object) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make()  # type: ignore[operator]


def test_system_aware_fast_default_is_32() -> None:
    assert SystemAwareSteps().local_steps(team(2, 0)) == [32, 32]


def test_system_aware_paper_setting() -> None:
    assert SystemAwareSteps(32, 1).local_steps(team(8, 2)) == [32] * 8 + [1] * 2


def test_system_aware_every_slow_worker_has_its_own_speed() -> None:
    # 0.5 * 32 = 16; 0.1 * 32 + 0.5 = 3.7 -> 3; 0.3 * 32 + 0.5 = 10.1 -> 10
    workers = [
        Participant(True, 32, speed_ratio=1.0),
        Participant(False, 32, speed_ratio=0.5),
        Participant(False, 32, speed_ratio=0.1),
        Participant(False, 32, speed_ratio=0.3),
    ]
    assert SystemAwareSteps(32).local_steps(workers) == [32, 16, 3, 10]


def test_system_aware_given_steps_come_first() -> None:
    workers = [
        Participant(True, 32, speed_ratio=1.0, given_steps=5),
        Participant(False, 32, speed_ratio=0.5, given_steps=3),
        Participant(False, 32, speed_ratio=0.5),
    ]
    assert SystemAwareSteps(32, 8).local_steps(workers) == [5, 3, 8]


def test_system_aware_local_steps_slow_come_before_gamma() -> None:
    workers = [Participant(True, 32), Participant(False, 32, speed_ratio=0.5)]
    assert SystemAwareSteps(32, 4).local_steps(workers) == [32, 4]


def test_system_aware_local_steps_fast_come_before_gamma() -> None:
    workers = [Participant(True, 32, speed_ratio=1.0), Participant(True, 32, speed_ratio=0.8)]
    assert SystemAwareSteps(32, 4).local_steps(workers) == [32, 32]


def test_system_aware_slow_without_steps_or_speed_refused() -> None:
    workers = [Participant(True, 32, speed_ratio=1.0), Participant(False, 32)]
    with pytest.raises(ValueError, match="local-steps-slow"):
        SystemAwareSteps(32).local_steps(workers)


@QUICK
@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), st.integers(1, 64))
def test_system_aware_from_gamma_is_the_formula(gammas: list[float], tau_fast: int) -> None:
    workers = [Participant(False, 32, speed_ratio=gamma) for gamma in gammas]
    expected = [max(1, math.floor(gamma * tau_fast + 0.5)) for gamma in gammas]
    assert SystemAwareSteps(tau_fast).local_steps(workers) == expected


# steps of everybody by speed


def test_by_speed_five_speeds() -> None:
    # 0.1 / 0.1, 0.125, 0.2, 0.4 and 0.8 s a step: gamma 1, 0.8, 0.5, 0.25, 0.125
    gammas = speed_ratios([0.1, 0.125, 0.2, 0.4, 0.8])
    assert gammas == pytest.approx([1.0, 0.8, 0.5, 0.25, 0.125])
    workers = [Participant(place < 2, 32, gamma) for place, gamma in enumerate(gammas)]
    # 32 x gamma: 32, 25.6, 16, 8, 4; fast and slow alike
    assert BySpeedSteps(32).local_steps(workers) == [32, 26, 16, 8, 4]
    assert batch_sizes_of(BySpeedSteps(32), workers) == [32] * 5
    # the paper's rule gives every fast worker tau_fast
    assert SystemAwareSteps(32).local_steps(workers) == [32, 32, 16, 8, 4]


def test_by_speed_asks_for_the_speed_of_fast_workers_too() -> None:
    policy = BySpeedSteps()
    assert (policy.needs_speeds, policy.of_fast_ones_too) == (True, True)
    with pytest.raises(ValueError, match=r"by-speed.*none is known"):
        policy.local_steps([Participant(True, 32), Participant(False, 32, 0.5)])


def test_by_speed_given_steps_come_first() -> None:
    workers = [Participant(True, 32, 1.0), Participant(True, 32, 0.01, given_steps=5)]
    assert BySpeedSteps(32).local_steps(workers) == [32, 5]
    assert batch_sizes_of(BySpeedSteps(32), workers) == [32, 32]


# smaller batches for workers that are too slow for one step


@pytest.mark.parametrize(
    ("gamma", "tau_fast", "batch", "expected"),
    [
        (1.0, 32, 64, 64),
        (0.75 / 32, 32, 64, 64),  # gamma tau = 3/4: a whole step
        (0.74 / 32, 32, 64, 47),  # 0.74 x 64 + 0.5 = 47.86
        (0.5 / 32, 32, 64, 32),
        (0.25 / 32, 32, 11, 3),  # 2.75 + 0.5 = 3.25
        (0.01, 32, 128, 41),  # 0.32 x 128 + 0.5 = 41.46
        (1e-6, 32, 64, 2),  # never below 2
        (0.5, 1, 2, 2),
        (0.1, 1, 2, 2),
    ],
)
def test_shrunk_batch_worked(gamma: float, tau_fast: int, batch: int, expected: int) -> None:
    assert shrunk_batch(gamma, tau_fast, batch) == expected


@QUICK
@given(st.floats(1e-5, 1.0), st.integers(1, 64), st.integers(2, 256))
def test_shrunk_batch_load_is_the_speed(gamma: float, tau_fast: int, batch: int) -> None:
    """load = tau b / B is within half a step of gamma tau_fast, or half a sample below a step."""
    size = shrunk_batch(gamma, tau_fast, batch)
    steps = proportional_steps(gamma, tau_fast)
    assert 2 <= size <= batch
    load = steps * size / batch
    if size < batch:
        assert steps == 1
        assert size == 2 or abs(load - gamma * tau_fast) <= 0.5 / batch + 1e-9
    elif steps > 1:
        assert abs(load - gamma * tau_fast) <= 0.5 + 1e-9


def test_system_aware_shrinks_the_batch_only_where_tau_comes_from_gamma() -> None:
    slow = Participant(False, 64, speed_ratio=0.25 / 32)
    workers = [
        Participant(True, 64, speed_ratio=1.0),
        slow,
        Participant(False, 64, speed_ratio=0.25 / 32, given_steps=1),
        Participant(True, 64, speed_ratio=0.25 / 32),  # a slow card that is called fast
        Participant(False, 64, speed_ratio=0.5),
    ]
    policy = SystemAwareSteps(32)
    assert policy.local_steps(workers) == [32, 1, 1, 32, 16]
    assert policy.batch_sizes(workers) == [64, 16, 64, 64, 64]
    assert SystemAwareSteps(32, 1).batch_sizes(workers) == [64] * 5
    assert SystemAwareSteps(32, None, False).batch_sizes(workers) == [64] * 5
    assert batch_sizes_of(SameSteps(1), workers) == [64] * 5


def test_batch_sizes_of_a_policy_that_decides_none_are_the_common_one() -> None:
    assert batch_sizes_of(FixedSteps((1, 2)), [Participant(True, 8), Participant(False, 8)]) == [
        8,
        8,
    ]
