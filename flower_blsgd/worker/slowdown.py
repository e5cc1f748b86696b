"""Seem slower than one is, on purpose."""

import math
import time

_LONGEST_SLEEP_SECONDS = 0.5
"""A handler must notice a signal soon, so it never blocks longer in one call."""


class Slowdown:
    """Makes the steps of a worker take a multiple of their time.

    Parameters
    ----------
    factor : float
        How many times as long, >= 1.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self.best_step_seconds = math.inf
        """The best mean of all orders so far."""

    def seconds(self, elapsed: float, steps: int) -> float:
        """Return how long so many steps take on the slower device, if they took `elapsed` here.

        The time of a step is the best mean of all orders so far: a core that just slept computes
        its first steps more slowly, and that would count `factor` times.
        """
        if self._factor == 1:
            return elapsed
        self.best_step_seconds = min(self.best_step_seconds, elapsed / steps)
        return max(elapsed, steps * self.best_step_seconds * self._factor)

    def sleep(self, start: float, steps: int) -> None:
        """Sleep until a slower device would have done these steps.

        Parameters
        ----------
        start : float
            When they began, by `time.perf_counter`.
        steps : int
            How many are done.
        """
        until = self.seconds(time.perf_counter() - start, steps)
        while (left := start + until - time.perf_counter()) > 0:
            time.sleep(min(left, _LONGEST_SLEEP_SECONDS))
