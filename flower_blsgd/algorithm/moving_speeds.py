"""Speeds while training: measured, smoothed, and whether they changed enough to matter."""

from collections.abc import Mapping

from .local_steps import speed_ratios


class MovingSpeeds:
    """An exponential moving average of every worker's seconds per step.

    Parameters
    ----------
    smoothing : float (default: 0.4)
        Share of the newest value in the average, in (0, 1]: after five rounds at a new speed
        92 % of the change is in.
    """

    def __init__(self, smoothing: float = 0.4) -> None:
        if not 0 < smoothing <= 1:
            raise ValueError(f"smoothing = {smoothing} must lie in (0, 1]")
        self._smoothing = smoothing
        self._seconds: dict[int, float] = {}

    @property
    def seconds_per_step(self) -> Mapping[int, float]:
        """The averages, by worker index."""
        return self._seconds

    def add(self, worker: int, seconds_per_step: float) -> None:
        """Take one measurement."""
        old = self._seconds.get(worker, seconds_per_step)
        self._seconds[worker] = old + self._smoothing * (seconds_per_step - old)

    def forget(self, worker: int) -> None:
        """Drop what is known of a worker."""
        self._seconds.pop(worker, None)


def speeds_changed(
    used: Mapping[int, float], measured: Mapping[int, float], fall: float, rise: float
) -> bool:
    """Return whether some worker's gamma left the dead band around the one in use.

    The band may be wider upwards: that everybody waits for a worker with too many steps costs
    more than that one with too few is idle.

    Parameters
    ----------
    used, measured : mapping of int to float
        Seconds per step by worker index; a worker that is in one only is new, or gone.
    fall, rise : float
        Relative change of gamma, down and up, that is still ignored, >= 0.

    Examples
    --------
    >>> speeds_changed({0: 1.0, 1: 4.0}, {0: 2.0, 1: 8.4}, 0.1, 0.25)
    False
    >>> speeds_changed({0: 1.0, 1: 4.0}, {0: 1.0, 1: 4.6}, 0.1, 0.25)
    True
    """
    if used.keys() != measured.keys():
        return True
    workers = list(used)
    old = speed_ratios([used[worker] for worker in workers])
    new = speed_ratios([measured[worker] for worker in workers])
    return any(
        a is not None and b is not None and not -fall <= b / a - 1 <= rise
        for a, b in zip(old, new, strict=True)
    )
