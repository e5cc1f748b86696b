"""Means, paired differences and times to a target, worked by hand."""

import pytest

from flower_blsgd.experiments.comparison import (
    AlgorithmFigures,
    Comparison,
    TimeToTarget,
    common_target,
    compare,
    paired_difference,
    reached_at,
)

from .made_runs import made_run


def of(comparison: Comparison, algorithm: str) -> AlgorithmFigures:
    return next(one for one in comparison.algorithms if one.algorithm == algorithm)


def test_means_over_seeds() -> None:
    runs = [
        made_run("a", 0, (0.5, 0.90), 2.0, 1.0, fast_waiting_share=0.5),
        made_run("a", 1, (0.5, 0.92), 3.0, 2.0, fast_waiting_share=None),
        made_run("a", 2, (0.5, 0.94), 4.0, 3.0, fast_waiting_share=0.25),
    ]
    one = compare(runs, "a").algorithms[0]
    assert one.n == 3
    assert one.accuracy == pytest.approx(0.92)
    assert one.accuracy_deviation == pytest.approx(0.02)  # sqrt((0.02^2 + 0 + 0.02^2) / 2)
    assert (one.training_seconds, one.device_seconds) == (6.0, 4.0)
    assert one.fast_waiting_share == 0.375  # of the two that have it
    assert one.difference is None


def test_best_is_first_and_ties_keep_their_order() -> None:
    runs = [made_run(name, 0, (x,)) for name, x in (("c", 0.8), ("a", 0.9), ("b", 0.8))]
    runs.append(made_run("never", 0, (None,)))
    comparison = compare(runs, "c")
    assert [one.algorithm for one in comparison.algorithms] == ["a", "c", "b", "never"]
    assert [one.accuracy_deviation for one in comparison.algorithms] == [None] * 4  # one seed
    assert of(comparison, "never").n == 0
    assert of(comparison, "never").difference is None


def test_differences_are_taken_by_seed() -> None:
    # Seeds 1 and 2 are common: 0.86 - 0.80 = 0.06 and 0.90 - 0.80 = 0.10, in another order.
    runs = [
        *(made_run("a", seed, (x,)) for seed, x in ((0, 0.1), (1, 0.80), (2, 0.80))),
        *(made_run("b", seed, (x,)) for seed, x in ((2, 0.90), (1, 0.86), (7, 0.99))),
    ]
    difference = of(compare(runs, "a"), "b").difference
    assert difference is not None
    assert difference.pairs == 2
    assert difference.mean == pytest.approx(0.08)
    # Standard deviation 0.02 sqrt(2): the half width is 12.706 x 0.02.
    assert difference.interval == pytest.approx((0.08 - 0.25412, 0.08 + 0.25412), abs=1e-5)


def test_time_to_target_is_that_of_the_first_evaluated_epoch_that_reached_it() -> None:
    runs = [
        made_run("a", 0, (0.5, None, 0.81, 0.9), 2.0, 1.0),  # epoch 3: 6 s and 3 s
        made_run("a", 1, (0.8, 0.7, 0.7, 0.7), 2.0),  # epoch 1, though lower later: 2 s
        made_run("a", 2, (0.5, 0.6, 0.7, 0.79), 2.0, 1.0),
    ]
    comparison = compare(runs, "a", target=0.8)
    assert comparison.target_given
    assert comparison.algorithms[0].to_target == TimeToTarget(2, 3, 4.0, 3.0)
    none = compare(runs, "a", target=0.99).algorithms[0].to_target
    assert none == TimeToTarget(0, 3, None, None)


def test_target_by_default_is_what_every_run_reached() -> None:
    runs = [made_run("a", 0, (0.5, 0.97894)), made_run("b", 0, (0.98333, 0.9))]
    comparison = compare(runs, "a")
    assert comparison.target == 0.978
    assert not comparison.target_given
    assert all(one.to_target and one.to_target.reached == 1 for one in comparison.algorithms)


@pytest.mark.parametrize("thousandths", [290, 570, 970, 983, 1000])
def test_target_is_not_below_a_whole_tenth_of_a_point(thousandths: int) -> None:
    """0.29 / 0.001 is 290.00000000000006 or a little less, as rounding has it."""
    run = made_run("a", 0, (thousandths / 1000,))
    target = common_target([run])
    assert target == thousandths / 1000
    assert reached_at(run, target) is run.epochs[0]


def test_without_an_evaluation_there_is_no_target() -> None:
    comparison = compare([made_run("a", 0, (0.5,)), made_run("b", 0, (None,))], "a")
    assert comparison.target is None
    assert comparison.algorithms[0].to_target is None


# --- paired differences; Student's 97.5 % quantiles are 12.706 for 2 pairs and 4.303 for 3


@pytest.mark.parametrize(
    ("differences", "mean", "half_width", "words"),
    [
        ([1.0, 3.0], 2.0, 12.706, "no difference shown"),  # 12.706 x sqrt(2) / sqrt(2)
        ([3.0, 4.0, 5.0], 4.0, 2.4841, "better"),  # 4.303 / sqrt(3)
        ([-3.0, -4.0, -5.0], -4.0, 2.4841, "worse"),
        ([0.5], 0.5, None, "no difference shown (one pair of runs cannot)"),
        ([0.25, 0.25 + 1e-15, 0.25], pytest.approx(0.25), None, "no difference shown"),
        ([0.0, 0.0], 0.0, None, "no difference shown"),
    ],
)
def test_paired_difference(
    differences: list[float], mean: float, half_width: float | None, words: str
) -> None:
    found = paired_difference(differences)
    assert found is not None
    assert (found.mean, found.pairs, found.in_words) == (mean, len(differences), words)
    if half_width is None:
        assert found.interval is None
    else:
        assert found.interval == pytest.approx((mean - half_width, mean + half_width), abs=3e-4)
    assert found.shown == (words in ("better", "worse"))
