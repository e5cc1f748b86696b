"""How long to wait for replies: a multiple of what they took so far, never for ever."""

from collections.abc import Mapping
from typing import Any

_LEAST_SECONDS, _LEAST_AFTER_FAILURE_SECONDS = 30.0, 120.0
"""The second where a process may be starting."""

_MULTIPLE_OF_EXPECTED, _MULTIPLE_OF_LONGEST, MULTIPLE_OF_START = 10.0, 2.0, 3.0
_NEWEST_SHARE = 0.4


class Patience:
    """How long the replies to a group of messages may take.

    Ten times what is expected of them, twice the longest so far, at least half a minute. What is
    expected follows a moving average of the seconds per sample, transfer included, of those that
    answered. It costs nothing when all is well, so it is generous: only workers that hang are late.
    """

    def __init__(self) -> None:
        self._seconds_per_sample: dict[Any, float] = {}
        self._longest_seconds = 0.0

    def seconds(
        self, samples: Mapping[Any, int], most: float, start_seconds: float | None = None
    ) -> float:
        """Return for how many seconds to wait.

        Parameters
        ----------
        samples : mapping to int
            Who works on how many samples. Whoever compiles something first, such as a worker with
            a batch size that is new to it, is another one.
        most : float
            Never longer; and so long if anybody has not answered before.
        start_seconds : float, optional
            How long a process takes to start, if one of theirs may have to; then it is three times
            that, and two minutes, at least.
        """
        known = self._seconds_per_sample
        if not samples.keys() <= known.keys():
            return most
        expected = max((known[key] * count for key, count in samples.items()), default=0.0)
        least = _LEAST_SECONDS
        if start_seconds is not None:
            least = max(_LEAST_AFTER_FAILURE_SECONDS, MULTIPLE_OF_START * start_seconds)
        wanted = _MULTIPLE_OF_EXPECTED * expected, _MULTIPLE_OF_LONGEST * self._longest_seconds
        return min(most, max(least, *wanted))

    def learn(self, seconds: float, samples: Mapping[Any, int]) -> None:
        """Note how long it took until all of these had answered."""
        if samples:
            self._longest_seconds = max(self._longest_seconds, seconds)
        for key, count in samples.items():
            each = seconds / max(1, count)
            old = self._seconds_per_sample.get(key, each)
            self._seconds_per_sample[key] = moving_average(old, each)


def moving_average(before: float, newest: float) -> float:
    """Return the moving average with a newest value: after five alike, 92 % of them is in."""
    return before + _NEWEST_SHARE * (newest - before)
