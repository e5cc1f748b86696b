from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.local_steps import (
    FAST_SPEED_RATIO,
    BalancedBatches,
    Participant,
    SameSteps,
    StepPolicy,
    SystemAwareSteps,
    balanced_batches,
    fewest_steps,
    proportional_steps,
    shrunk_batch,
    speed_ratios,
    speeds_changed,
)

from .workers import by_speed, workers

_ratios = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=10)


# speed ratios, and steps in proportion to them


def test_speed_ratios_compare_with_the_fastest_that_is_known() -> None:
    # fastest 0.1 s: 0.1/0.2, 0.1/0.1, 0.1/0.4
    assert speed_ratios([0.2, 0.1, 0.4], [8] * 3) == pytest.approx([0.5, 1.0, 0.25])
    assert speed_ratios([None, 0.2, None, 0.1], [8] * 4) == [None, 0.5, None, 1.0]
    assert speed_ratios([None, None], [8] * 2) == [None, None]
    assert speed_ratios([], []) == []
    # each with its own batch: 640, 320 and 200 samples a second; the first is the fastest, though
    # its steps are not the shortest
    assert speed_ratios([0.1, 0.2, 0.08], [64, 64, 16]) == pytest.approx([1.0, 0.5, 1.25])
    assert speed_ratios([None, 0.2], [64, 2]) == [None, 1.0]
    assert FAST_SPEED_RATIO == 0.7


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
    steps = proportional_steps(gamma, tau_fast)
    assert steps == expected
    assert isinstance(steps, int)


# step policies


@pytest.mark.parametrize(
    ("policy", "participants", "steps"),
    [
        (SystemAwareSteps(), workers(2, 0), [32, 32]),
        (SystemAwareSteps(32, 1), workers(8, 2), [32] * 8 + [1] * 2),
        # 0.5 * 32 = 16; 0.1 * 32 + 0.5 = 3.7 -> 3; 0.3 * 32 + 0.5 = 10.1 -> 10
        (SystemAwareSteps(32), by_speed(32, 1.0, 0.5, 0.1, 0.3), [32, 16, 3, 10]),
        # the numbers of the settings come before gamma, for fast and slow workers
        (SystemAwareSteps(32, 4), by_speed(32, 1.0, 0.8, 0.5), [32, 32, 4]),
        # given steps come first
        (
            SystemAwareSteps(32, 8),
            [Participant(True, 32, 1.0, 5), Participant(False, 32, 0.5, 3), *by_speed(32, 0.5)],
            [5, 3, 8],
        ),
        # 32 x gamma: 32, 25.6, 16, 8, 4; fast and slow alike
        (SystemAwareSteps(32), by_speed(32, 1.0, 0.8, 0.5, 0.25, 0.125), [32, 26, 16, 8, 4]),
        # two that are named fast, and one that is named slow and is the fastest
        (
            SystemAwareSteps(32),
            [Participant(True, 32, 0.75), Participant(True, 32, 0.25), Participant(False, 32, 1.0)],
            [24, 8, 32],
        ),
        (SystemAwareSteps(32), [*by_speed(32, 1.0), Participant(True, 32, 0.01, 5)], [32, 5]),
        # a speed that is not known counts as that of the fastest
        (SystemAwareSteps(32), [*by_speed(32, 1.0), Participant(False, 32)], [32, 32]),
        (SystemAwareSteps(32), [Participant(True, 32), *by_speed(32, 0.5)], [32, 16]),
        # one number for all, whatever is known of them: steps= holds for system-aware only
        (SameSteps(32), [*by_speed(32, 0.1), Participant(False, 32, given_steps=5)], [32, 32]),
        (SameSteps(1), workers(1, 1), [1, 1]),
    ],
)
def test_local_steps_worked(
    policy: StepPolicy, participants: list[Participant], steps: list[int]
) -> None:
    assert policy.local_steps(participants) == steps
    assert policy.batch_sizes(participants) == [32] * len(participants)


def test_batches_shrink_only_where_the_steps_come_from_the_speed() -> None:
    very_slow = 0.25 / 32
    participants = [
        Participant(True, 64, 1.0),
        Participant(False, 64, very_slow),
        Participant(False, 64, very_slow, given_steps=1),
        Participant(True, 64, very_slow),  # a slow card that is named fast
        Participant(False, 64, 0.5),
    ]
    assert SystemAwareSteps(32).local_steps(participants) == [32, 1, 1, 1, 16]
    assert SystemAwareSteps(32).batch_sizes(participants) == [64, 16, 64, 16, 64]
    for policy in (SystemAwareSteps(32, 1), SystemAwareSteps(32, None, False), SameSteps(1)):
        assert policy.batch_sizes(participants) == [64] * 5
    own = [Participant(False, 64, 0.25 / 32, given_batch=20), Participant(True, 64, given_batch=20)]
    assert SystemAwareSteps(32).batch_sizes(own) == [5, 20]  # a quarter of its own
    assert SystemAwareSteps(32, 1).batch_sizes(own) == SameSteps(1).batch_sizes(own) == [20, 20]


def test_policies_say_which_speeds_they_need() -> None:
    needs = {
        policy: (policy.needs_speeds, policy.follows_speeds)
        for policy in (
            SystemAwareSteps(32),
            SystemAwareSteps(32, 4),
            SystemAwareSteps(None, 4),
            SameSteps(4),
            BalancedBatches(),
            SameSteps(None),
        )
    }
    assert list(needs.values()) == [
        (True, False),
        (False, False),
        (True, False),
        (False, False),
        (True, True),
        (True, False),
    ]


@pytest.mark.parametrize(
    ("policy", "speeds", "overhead_steps", "chosen"),
    [
        # 96 / 4 = 24 times the overhead: 2.4, so 2 are doubled once
        (SystemAwareSteps(None), (1.0, 0.5), 0.1, 4),
        (SystemAwareSteps(None), (1.0, 0.5), 0.08, 2),  # 1.92
        (SameSteps(None), (1.0, 0.5), 0.25, 8),  # 6: 1, 2 and 4 are too few
        (SystemAwareSteps(None), (1.0, 0.25), 0.08, 4),
        (SystemAwareSteps(None), (1.0, 1 / 3), 0.15, 6),
        # (16 + 1) / 18.6 and (14 + 1) / 16 of the samples: 8.6 % and 6.3 % lost. A slow worker that
        # waits costs less: 0.6 % (20 + 1 of 21.1) and 0.4 % (16 + 1 of 17.07)
        *[
            (SystemAwareSteps(None), (1.0, 1 / k), 0.3, n)
            for k, n in ((17.6, 20), (16, 17), (15, 16))
        ],
        # one more, so that the fast worker does not wait if the other falls 5 % behind (16 + 1 of
        # 17.9 samples, 17 + 1 of 18.1); from 7 steps it cannot be one without losing more
        *[(SystemAwareSteps(None), (1.0, 1 / k), 0.2, n) for k, n in ((7, 7), (10, 11), (20, 21))],
        # with 2: 1 step, as long as 2.13, so 4.1 % are lost (3 of 3.13); with 0.44 it is 8.3 %
        (SystemAwareSteps(None), (1.0, 0.47), 0.05, 2),
        (SystemAwareSteps(None), (1.0, 0.44), 0.05, 5),  # 2 steps, as long as 4.55: 7 of 7.2
        # 3 and 2 steps, as long as 3.75 and 4: 9 of 9.2; with 2 it is 5 of 5.75
        (SystemAwareSteps(None), (1.0, 0.8, 0.5), 0.05, 4),
        # the smallest batch counts: below 15 that of the second is cut
        (SystemAwareSteps(None), (1.0, 1 / 20, 0.5), 0.05, 20),
        (SystemAwareSteps(None, 8), (1.0, 0.1), 0.05, 2),  # nothing is rounded
        (SystemAwareSteps(None), (1.0, 0.8), 0.05, 5),  # with 4 it is 2.8 %, a quarter more: 0
        (
            SystemAwareSteps(None),
            (1.0, 0.01),
            0.0,
            64,
        ),  # 0.64 of a step: the batch that is cut least
        (SystemAwareSteps(None, None, False), (1.0, 0.01), 0.0, 72),  # the step takes 100
        (SystemAwareSteps(None), (1.0, 0.5), 8.0, 256),  # 192
        (SystemAwareSteps(None), (1.0, 0.5), 1e9, 512),
        (
            SystemAwareSteps(None),
            (1.0, 1 / 48),
            1e9,
            403,
        ),  # 384, and 8 steps that take 404 if 5 % slower; 768 would be too many
        (SystemAwareSteps(None), (1.0, 0.5), None, 32),
        (SystemAwareSteps(None), (1.0, 0.47), None, 35),  # 16 steps, as long as 34
        # one worker has nothing to average: 64, or more if rounds are costly (72, 96)
        (SystemAwareSteps(None), (1.0,), 0.05, 64),
        (SystemAwareSteps(None), (1.0,), None, 64),
        (SystemAwareSteps(None), (1.0,), 3.0, 128),
        (SystemAwareSteps(None), (1.0,), 0.0, 1),
    ],
)
def test_fewest_steps_that_waste_little_worked(
    policy: StepPolicy,
    speeds: tuple[float, ...],
    overhead_steps: float | None,
    chosen: int,
) -> None:
    assert fewest_steps(policy, by_speed(32, *speeds), overhead_steps) == chosen


@given(
    speeds=st.lists(st.floats(0.02, 1.0), min_size=1, max_size=4),
    overhead=st.floats(0.0, 21.0),
)
def test_fewest_steps_keep_what_they_promise_where_that_can_be_had(
    speeds: list[float], overhead: float
) -> None:
    def lost(tau: int) -> float:
        policy, participants = SystemAwareSteps(tau, None, False), by_speed(64, 1.0, *speeds)
        steps = policy.local_steps(participants)
        seconds = max(n / g for n, g in zip(steps, (1.0, *speeds), strict=True))
        return 1 - sum(steps) / (seconds * (1 + sum(speeds)))

    policy, participants = SystemAwareSteps(None, None, False), by_speed(64, 1.0, *speeds)
    shortest, chosen = (fewest_steps(policy, participants, o) for o in (0.0, overhead))
    least = min(map(lost, (*range(1, 9), 10, 12, 14, 16)))
    assert lost(shortest) <= max(0.05, least) + 1e-9
    assert 1 <= shortest <= chosen <= 512
    assert 2 * chosen > 512 or overhead / (overhead + chosen) <= 0.04
    before = chosen / 2 / 1.125  # it was doubled, and grew by an eighth at most
    assert chosen <= 1.125 * shortest or overhead / (overhead + before) > 0.04


def test_step_policy_below_one_step_refused() -> None:
    for policy, arguments in (
        (SameSteps, [0]),
        (SystemAwareSteps, [0]),
        (SystemAwareSteps, [32, 0]),
    ):
        with pytest.raises(ValueError, match="at least 1"):
            policy(*arguments)


# dynamic load balancing: batches by throughput


@pytest.mark.parametrize(
    ("total", "shares", "batches"),
    [
        (96, [0.5, 0.25, 0.25], [48, 24, 24]),
        # 60.6, 2.4, 1.0: the last gets 2, the others share 62 as 25 : 1 (59.6 and 2.4)
        (64, [0.947, 0.0375, 0.0155], [60, 2, 2]),
        # 18.2, 1.6, 0.2: first only 0.2 is too small; of 18 the other two would get 16.5 and 1.5,
        # a tie of remainders that gives the second 1; so it is 2 as well
        (20, [0.91, 0.08, 0.01], [16, 2, 2]),
        (6, [0.98, 0.01, 0.01], [2, 2, 2]),
    ],
)
def test_balanced_batches_worked(total: int, shares: list[float], batches: list[int]) -> None:
    assert balanced_batches(total, shares) == batches


@given(_ratios, st.integers(2, 300))
def test_balanced_batches_sum_exactly_and_none_is_below_two(
    ratios: list[float], batch_size: int
) -> None:
    batches = BalancedBatches().batch_sizes(by_speed(batch_size, *ratios))
    assert sum(batches) == batch_size * len(ratios)
    assert min(batches) >= 2
    for one in range(len(ratios) - 1):
        if ratios[one] > ratios[one + 1]:  # the faster never has less, but for a rounding
            assert batches[one] >= batches[one + 1] - 1


# speeds that change


@pytest.mark.parametrize(
    ("measured", "changed"),
    [
        ([1.0, 4.0], False),
        ([2.0, 8.4], False),  # all twice as slow: gamma 0.25 -> 0.238, - 4.8 %
        ([1.0, 4.39], False),  # gamma - 8.9 %
        ([1.0, 4.45], True),  # gamma - 10.1 %
        ([1.0, 3.22], False),  # gamma + 24.2 %
        ([1.0, 3.18], True),  # gamma + 25.8 %
        ([1.2, 4.0], False),  # the fast one alone is slower: gamma + 20 %
        ([1.3, 4.0], True),  # + 30 %
        ([1.0, None], True),
    ],
)
def test_dead_band_of_a_tenth_down_and_a_quarter_up(
    measured: list[float | None], changed: bool
) -> None:
    assert speeds_changed([1.0, 4.0], measured, 0.1, 0.25, [1, 1]) is changed
    assert speeds_changed([1.0, None], [1.0, 4.0], 0.1, 0.25, [1, 1])
    # The first has 8 times the batch and is the fastest: the second's gamma rose by a quarter.
    assert not speeds_changed([1.0, 0.5], [1.0, 0.4], 0.1, 0.25, [8, 1])
    assert speeds_changed([1.0, 0.5], [1.0, 0.4], 0.1, 0.25, [1, 1])  # the first's fell by a fifth


def test_batch_is_not_shrunk_if_three_quarters_of_a_step_fit() -> None:
    assert [shrunk_batch(ratio, 1, 64) for ratio in (0.75, 0.74)] == [64, 47]
    found = [shrunk_batch(ratio, 32, 64) for ratio in (1 / 40, 1 / 64, 1 / 100, 1e-6)]
    assert found == [64, 32, 20, 2]


def test_balanced_batches_are_equal_while_a_speed_is_unknown() -> None:
    first, second = by_speed(32, 1.0, 0.25)
    unknown = replace(first, speed_ratio=None)
    assert BalancedBatches().batch_sizes([first, second]) == [51, 13]
    assert BalancedBatches().batch_sizes([unknown, second]) == [32, 32]
