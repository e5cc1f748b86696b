"""The mean of several seeds' curves, and the band between the lowest and the highest."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Curve = Sequence[tuple[float, float]]
"""Points (x, y), x rising."""


@dataclass(frozen=True)
class SeedBand:
    """Curves of several seeds, summed up at common places."""

    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def seed_band(curves: Sequence[Curve]) -> SeedBand | None:
    """Sum up curves where all of them were measured.

    Between measured points a straight line is assumed; beyond the first and the last of any
    curve nothing is. One point more is where the curves end on average: the mean of their last
    points, even if some last longer. So the band ends at the mean of what was reached at last.
    Curves that have no place in common are summed up by their ends alone.

    Returns
    -------
    SeedBand or None
        None without a curve; one without a point counts as none.

    Examples
    --------
    One curve from 0 to 2, another from 1 to 3: they meet between 1 and 2, and end at 2.5.

    >>> band = seed_band([[(0, 0.0), (2, 4.0)], [(1, 4.0), (3, 8.0)]])
    >>> band.x.tolist(), band.mean.tolist()
    ([1.0, 2.0, 2.5], [3.0, 5.0, 6.0])
    """
    points = [np.array(curve, float) for curve in curves if len(curve)]
    if not points:
        return None
    end = np.mean([curve[-1] for curve in points], axis=0)[0]
    first = max(curve[0, 0] for curve in points)
    last = min(curve[-1, 0] for curve in points)
    places = np.unique(np.concatenate([curve[:, 0] for curve in points]))
    x = places[(places >= first) & (places <= last) & (places < end)]
    inner = [np.interp(x, curve[:, 0], curve[:, 1]) for curve in points]
    y = np.column_stack([inner, [curve[-1, 1] for curve in points]])
    return SeedBand(np.append(x, end), y.mean(axis=0), y.min(axis=0), y.max(axis=0))
