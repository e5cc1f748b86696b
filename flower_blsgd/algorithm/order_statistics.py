"""Which value stands at a place of the sorted losses, without sorting or copying them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .block_draws import blocks

_HALF_BITS = 16
_NUM_HALVES = 2**_HALF_BITS
_SIGN_BIT = np.uint32(1 << 31)
_LOWEST_INT = np.int32(-(2**31))


def values_at(values: npt.NDArray[np.float32], places: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the values that stand at these places once all are sorted.

    The bits of a float, read as a whole number, rank as the floats do. So their upper half is
    counted, then the lower half of those that share the upper half of a value asked for: exact
    whatever the values are, linear in N, and a few MiB of memory however large it is.

    Parameters
    ----------
    values : numpy.ndarray
        float32 of shape (N,), no nan; infinity ranks highest.
    places : sequence of int
        Each in [0, N); 0 is the lowest value.

    Returns
    -------
    numpy.ndarray
        float32, one for each place.
    """
    parts = blocks(len(values))
    if len(parts) == 1:
        return np.partition(values, places)[places]
    upper_counts = np.zeros(_NUM_HALVES, np.int64)
    for part in parts:
        keys = _keys(values[part])
        keys >>= _HALF_BITS
        upper_counts += np.bincount(keys, minlength=_NUM_HALVES)
    upper_ends = np.cumsum(upper_counts)
    uppers = np.searchsorted(upper_ends, places, side="right")
    lower_counts = {int(upper): np.zeros(_NUM_HALVES, np.int64) for upper in uppers}
    for part in parts:
        keys = _keys(values[part])
        for upper in lower_counts:
            inside = keys[keys >> _HALF_BITS == upper] & (_NUM_HALVES - 1)
            lower_counts[upper] += np.bincount(inside, minlength=_NUM_HALVES)
    found = []
    for place, upper in zip(places, uppers.tolist(), strict=True):
        below = int(upper_ends[upper] - upper_counts[upper])
        lower = int(np.searchsorted(np.cumsum(lower_counts[upper]), place - below, side="right"))
        found.append(upper << _HALF_BITS | lower)
    keys = np.array(found, np.uint32)
    return np.where(keys & _SIGN_BIT, keys ^ _SIGN_BIT, ~keys).view(np.float32)


def _keys(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Return whole numbers that rank as the values do (and -0 below 0)."""
    bits = values.view(np.int32)
    keys = bits >> 31  # 0 or -1
    keys |= _LOWEST_INT
    keys ^= bits  # a negative float ranks the lower the higher its bits: all are turned round
    return keys.view(np.uint32)
