"""How long the fast device alone takes for what an arm reached; see PLAN3.md."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

Values = Mapping[int, float]
"""What is compared, larger is better, or seconds, by seed."""


@dataclass(frozen=True)
class Interval:
    """A mean with an interval of 95 %; nan bounds for one value."""

    mean: float
    low: float
    high: float
    count: int


def interval(values: Sequence[float]) -> Interval:
    """Return mean and Student's t interval; ValueError without a value."""
    if not values:
        raise ValueError("no values")
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
    return Interval(mean, mean - half, mean + half, count)


class Alone:
    """What the fast device alone reaches, as a function of its time.

    The mean over the seeds is linear in log time between budgets, and continues beyond them as in
    the nearest part. Each seed differs from it by a constant. `budgets` are values by seed, by the
    seconds of at least two budgets, all with the same seeds.
    """

    def __init__(self, budgets: Mapping[float, Values]) -> None:
        seconds = sorted(budgets)
        self.logs = [math.log(one) for one in seconds]
        values = np.array([[one for _, one in sorted(budgets[s].items())] for s in seconds])
        self._means = values.mean(1)
        offsets = values.mean(0) - values.mean()
        self._offsets = dict(zip(sorted(budgets[seconds[0]]), offsets.tolist(), strict=True))

    def log_seconds(self, seed: int, value: float) -> float:
        """Return the logarithm of the seconds in which it reaches a value; inf if it never does."""
        wanted = value - self._offsets[seed]
        part = int(np.searchsorted(self._means[1:-1], wanted))
        low, high = self._means[part : part + 2]
        if high <= low:  # longer budgets were not better
            return math.copysign(math.inf, wanted - low)
        share = (wanted - low) / (high - low)
        return float(self.logs[part] + share * (self.logs[part + 1] - self.logs[part]))


@dataclass(frozen=True)
class Speedup:
    """How many times sooner: the geometric mean over seeds, and each seed's factor.

    In `extrapolated` seeds a result is outside the budgets of the fast device alone.
    """

    factor: Interval
    by_seed: tuple[float, ...]
    extrapolated: int


def speedup(
    budgets: Mapping[float, Values],
    arm: tuple[Values, Values],
    rival: tuple[Values, Values] | None = None,
) -> Speedup:
    """Return how many times sooner an arm is than the fast device alone, or than a rival.

    Of both, what it reached and its seconds are given. Only seeds that all have are used, at least
    one, or there is a ValueError. The interval is that of the jackknife over seeds, so it includes
    how well the curve of the fast device is known.
    """
    sides = [arm] if rival is None else [arm, rival]
    seeds = sorted(set(arm[0]).intersection(*budgets.values(), *(side[0] for side in sides)))
    if not seeds:
        raise ValueError("no pairs")

    def reached(used: Sequence[int]) -> tuple[Alone, list[list[float]]]:
        alone = Alone({s: {one: own[one] for one in used} for s, own in budgets.items()})
        return alone, [[alone.log_seconds(one, side[0][one]) for side in sides] for one in used]

    def logs(used: Sequence[int]) -> list[float]:
        found = []
        for seed, own in zip(used, reached(used)[1], strict=True):
            each = [log - math.log(side[1][seed]) for log, side in zip(own, sides, strict=True)]
            found.append(each[0] - sum(each[1:]))
        return found

    every, count = logs(seeds), len(seeds)
    mean = float(np.mean(every))
    half = math.nan
    if count > 2:
        without = [float(np.mean(logs([s for s in seeds if s != left]))) for left in seeds]
        pseudo = interval([count * mean - (count - 1) * one for one in without])
        half = pseudo.high - pseudo.mean
    alone, found = reached(seeds)
    first, last = alone.logs[0] - 1e-9, alone.logs[-1] + 1e-9
    outside = sum(any(not first <= log <= last for log in own) for own in found)
    bounds = (math.exp(log) for log in (mean, mean - half, mean + half))
    return Speedup(Interval(*bounds, count), tuple(math.exp(one) for one in every), outside)
