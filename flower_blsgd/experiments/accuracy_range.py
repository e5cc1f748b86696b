"""Which part of an accuracy axis shows the order of algorithms."""

import math
from collections.abc import Sequence
from statistics import quantiles

_LEAST_SPAN = 0.5
"""Points; below that we would enlarge noise."""

_ABOVE_ALL = 100.2
"""Percent; a mark at 100 is not cut."""


def final_range(finals: Sequence[float]) -> tuple[float, float]:
    """Return the part of the axis that shows final accuracies, in percent.

    All of them, but for those so far below the rest (three times the distance of the quartiles
    below the lower one: Tukey's "far out") that the others would become one point.

    Parameters
    ----------
    finals : sequence of float
        Of every run, at least one.

    Examples
    --------
    A run that diverged does not take the room of those that did not:

    >>> final_range([10.0, 97.0, 98.0, 98.0, 98.0, 99.0, 99.0])
    (96.7, 99.24)
    """
    if len(finals) > 3:
        lower, _, upper = quantiles(finals, n=4, method="inclusive")
        fence = lower - 3 * max(upper - lower, _LEAST_SPAN)
    else:
        fence = min(finals)
    low, high = min(value for value in finals if value >= fence), max(finals)
    margin = max(0.12 * (high - low), (_LEAST_SPAN - (high - low)) / 2)
    return _down(max(0.0, low - margin)), round(min(_ABOVE_ALL, high + margin), 4)


def curve_range(finals: Sequence[float], points: Sequence[float]) -> tuple[float, float]:
    """Return the part that shows curves: their ends take the upper 40 percent, or less.

    At least a tenth of the whole rise is seen, for a shape and not only an end.

    Parameters
    ----------
    finals : sequence of float
        Of every run, in percent.
    points : sequence of float
        All that will be drawn, in percent.
    """
    low, high = final_range(finals)
    high = max(high, min(_ABOVE_ALL, max(points)))
    margin = 0.02 * (high - low)
    span = max(2.5 * (high - low), 0.1 * (high - min(points)))
    return _down(max(0.0, high - span, min(points) - margin)), high


def accuracy_axis(low: float) -> str:
    """Return the name of an axis, and where it starts if that is not 0."""
    return "accuracy (%)" + (f", axis starts at {low:g}" if low > 0 else "")


def _down(percent: float) -> float:
    """Round an axis' start, which is written out."""
    return math.floor(10 * percent) / 10
