"""Time of a device: waiting for its work, and slowing it on purpose."""

import time

import torch

_SPIN_SECONDS, _LEAST_SHARE, _SHARED_TIMES, _SLEEP_SECONDS = 0.005, 0.8, 3, 0.1
"""`throttle` spins for the first number of seconds at a time. If it gets less than the given share
of the core in that many spins in a row, it sleeps for the last number of seconds.
"""


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished the work that this thread launched."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


class StepClock:
    """Time of an order's steps on a device, or on one that is slower by a factor.

    `before` is the duration of the order's steps that ended earlier.
    """

    def __init__(self, device: torch.device, slowdown: float, before: float = 0.0) -> None:
        self.paused_seconds = 0.0
        self._before = before
        self._device = device
        self._slowdown = slowdown
        synchronize(device)
        self._started_at = time.time()
        self._began = time.perf_counter()

    def leave_out(self, began: float) -> None:
        """Leave out the part of these steps since `began`, of `time.perf_counter`."""
        self.paused_seconds += time.perf_counter() - max(began, self._began)

    def is_over(self, deadline_seconds: float) -> bool:
        """Return whether the steps have taken as long as the deadline; 0 for none."""
        if deadline_seconds == 0:
            return False
        synchronize(self._device)  # otherwise the host runs ahead of the device
        return self._before + self._slowdown * self._seconds() >= deadline_seconds

    def end(self) -> tuple[float, float, float]:
        """Wait until the steps are done; return their seconds, and the times of start and end."""
        synchronize(self._device)
        throttle(self._began + self.paused_seconds, self._slowdown)
        seconds = self._seconds()
        started_at = self._started_at - self._before
        return self._before + seconds, started_at, self._started_at + seconds

    def _seconds(self) -> float:
        return time.perf_counter() - self._began - self.paused_seconds


def throttle(start: float, slowdown: float) -> None:
    """Emulate a slower device: wait until work begun at `start` took `slowdown` times as long.

    The core stays busy while waiting. Sleeping instead made the next steps longer, which the
    slowdown then multiplied. If other processes need the core, the wait sleeps.
    """
    until, times_shared = start + slowdown * (time.perf_counter() - start), 0
    while (began := time.perf_counter()) < until:
        own, spin_until = time.thread_time(), min(until, began + _SPIN_SECONDS)
        while (now := time.perf_counter()) < spin_until:
            pass
        is_shared = time.thread_time() - own < _LEAST_SHARE * (now - began)
        times_shared = times_shared + 1 if is_shared else 0
        if times_shared >= _SHARED_TIMES and now < until:
            time.sleep(min(until - now, _SLEEP_SECONDS))
