"""How far two algorithms lie apart, and whether their seeds are enough to claim it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

_T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL_QUANTILE = 1.960
_NO_SPREAD = 1e-9
"""Differences of accuracies that are equal but for rounding."""


@dataclass(frozen=True)
class Difference:
    """The mean of differences between pairs of runs with equal seeds.

    Attributes
    ----------
    pairs : int
        How many.
    interval : (float, float), optional
        95 % confidence interval of the mean; None where the pairs cannot tell it: there is but
        one, or all differ by the same, which says nothing of how much a further one would.
    """

    mean: float
    pairs: int
    interval: tuple[float, float] | None

    @property
    def shown(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def in_words(self) -> str:
        """What the pairs say."""
        if self.shown:
            return "better" if self.mean > 0 else "worse"
        if self.interval is None and self.pairs == 1:
            return "one pair shows no difference"
        return "no difference shown"


def paired_difference(differences: Sequence[float]) -> Difference | None:
    """Return mean and interval of differences, one of each pair; None without a pair.

    The interval is Student's, for the mean of paired differences.

    Examples
    --------
    Mean 2, standard deviation 1, so 2 -+ 4.303 x 1 / sqrt(3):

    >>> found = paired_difference([1.0, 2.0, 3.0])
    >>> [round(bound, 3) for bound in found.interval], found.in_words
    ([-0.484, 4.484], 'no difference shown')
    """
    if not differences:
        return None
    pairs, mean = len(differences), fmean(differences)
    spread = stdev(differences) if pairs > 1 else 0.0
    if spread <= _NO_SPREAD:
        return Difference(mean, pairs, None)
    margin = t_quantile(pairs - 1) * spread / math.sqrt(pairs)
    return Difference(mean, pairs, (mean - margin, mean + margin))


def t_quantile(degrees_of_freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution; above 30 degrees the normal one.

    Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, "Critical Values of the
    Student's t Distribution".
    """
    if degrees_of_freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees_of_freedom - 1]
    return _NORMAL_QUANTILE
