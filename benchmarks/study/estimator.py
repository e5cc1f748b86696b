"""How much sooner an arm reaches a rival's accuracy, from runs of several budgets; see PLAN.md."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

SLOWEST = 0.5
"""Extrapolation goes no further than this speed-up."""


@dataclass(frozen=True)
class Curve:
    """What an arm reached for several budgets, with one seed.

    Parameters
    ----------
    seconds : tuple of float
        Ascending, at least two.
    accuracies : tuple of float
        As many.
    """

    seconds: tuple[float, ...]
    accuracies: tuple[float, ...]


@dataclass(frozen=True)
class Target:
    """A rival's run with the same seed: its time and its accuracy."""

    seconds: float
    accuracy: float


@dataclass(frozen=True)
class Interval:
    """A mean with Student's t interval of 95 %; nan bounds for one value."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def times(self) -> "Interval":
        """The same of logarithms, as factors."""
        return Interval(math.exp(self.mean), math.exp(self.low), math.exp(self.high), self.count)


@dataclass(frozen=True)
class Speedup:
    """How many times sooner, over seeds.

    Parameters
    ----------
    factor : Interval
        The geometric mean.
    by_seed : tuple of float
        Each seed's own factor.
    at_shortest, beyond_longest : int
        In how many seeds the shortest budget was enough (understated), or the longest was not.
    """

    factor: Interval
    by_seed: tuple[float, ...]
    at_shortest: int
    beyond_longest: int

    @property
    def logs(self) -> list[float]:
        """The logarithm of each seed's factor."""
        return [math.log(factor) for factor in self.by_seed]


def interval(values: Sequence[float]) -> Interval:
    """Return mean and t interval; ValueError without a value."""
    if not values:
        raise ValueError("no values")
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
    return Interval(mean, mean - half, mean + half, count)


def total(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the sum of two independent means, with Welch's interval of 95 %."""
    mean = float(np.mean(first) + np.mean(second))
    parts = [
        (float(np.var(values, ddof=1)) / len(values), len(values)) for values in (first, second)
    ]
    variance = sum(part for part, _ in parts)
    if not variance:
        return Interval(mean, mean, mean, len(first))
    freedom = variance**2 / sum(part**2 / (count - 1) for part, count in parts)
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half, len(first))


def monotone(values: Sequence[float]) -> list[float]:
    """Return the nearest values that never fall: pool adjacent violators.

    >>> monotone([1.0, 3.0, 2.0])
    [1.0, 2.5, 2.5]
    """
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [float(np.mean(pool)) for pool in pools for _ in pool]


def common_slope(curves: Sequence[Curve]) -> float:
    """Return the accuracy per unit of log time, an intercept for each curve; >= 0."""
    above = below = 0.0
    for curve in curves:
        x, y = np.log(curve.seconds), np.asarray(curve.accuracies)
        above += float(((x - x.mean()) * (y - y.mean())).sum())
        below += float(((x - x.mean()) ** 2).sum())
    return max(0.0, above / below)


def speedup(curves: Sequence[Curve], targets: Sequence[Target]) -> Speedup:
    """Return how many times sooner an arm reaches its rivals' accuracy.

    Parameters
    ----------
    curves : sequence of Curve
        Of the arm, a seed each.
    targets : sequence of Target
        Of the rival, in the same order of seeds.
    """
    slope = common_slope(curves)
    logs, at_shortest, beyond_longest = [], 0, 0
    for curve, target in zip(curves, targets, strict=True):
        x, y = np.log(curve.seconds), monotone(curve.accuracies)
        if target.accuracy < y[0]:
            at_shortest += 1
            reached = x[0]
        elif target.accuracy > y[-1]:
            beyond_longest += 1
            latest = math.log(target.seconds / SLOWEST)
            missing = target.accuracy - y[-1]
            reached = min(latest, x[-1] + missing / slope) if slope else latest
        else:
            above = next(i for i, value in enumerate(y) if value >= target.accuracy)
            reached = x[above]
            if above and y[above] > y[above - 1]:
                share = (target.accuracy - y[above - 1]) / (y[above] - y[above - 1])
                reached = x[above - 1] + share * (x[above] - x[above - 1])
        logs.append(math.log(target.seconds) - float(reached))
    factors = tuple(math.exp(one) for one in logs)
    return Speedup(interval(logs).times, factors, at_shortest, beyond_longest)
