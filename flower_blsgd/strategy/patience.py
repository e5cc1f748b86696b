"""Time to wait for replies: a multiple of the time of earlier replies."""

from collections.abc import Mapping
from typing import Any

_LEAST_SECONDS, _LEAST_AFTER_FAILURE_SECONDS = 30.0, 120.0
"""The second if a process may be starting."""

_MULTIPLE_OF_EXPECTED, _MULTIPLE_OF_LONGEST, MULTIPLE_OF_START = 10.0, 2.0, 3.0
_NEWEST_SHARE = 0.4


class Patience:
    """Maximum time of the replies to a group of messages.

    Ten times the expected time, twice the longest time so far, and at least 30 s. The expected time
    follows a moving average of the seconds per sample, including transfer. The limit is generous,
    because only workers that hang should be late.
    """

    def __init__(self) -> None:
        self._seconds_per_sample: dict[Any, float] = {}
        self._longest_seconds = 0.0

    def seconds(
        self, samples: Mapping[Any, int], most: float, start_seconds: float | None = None
    ) -> float:
        """Return the time to wait in seconds.

        `samples` has the number of samples by receiver. A worker with a new batch size is a new
        receiver, because it may compile first. `most` is the upper limit, and the result if a
        receiver is new. If a process may be starting, `start_seconds` is its start time, and the
        result is at least three times as long and at least 120 s.
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
        """Record the time until all of these receivers had answered."""
        if samples:
            self._longest_seconds = max(self._longest_seconds, seconds)
        for key, count in samples.items():
            each = seconds / max(1, count)
            old = self._seconds_per_sample.get(key, each)
            self._seconds_per_sample[key] = moving_average(old, each)


def moving_average(before: float, newest: float) -> float:
    """Return the updated moving average; five equal values have a share of 92 %."""
    return before + _NEWEST_SHARE * (newest - before)
