"""How long the steps of a device take: waiting for it, slowing it on purpose, and measuring it."""

import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..protocol import TrainOrder
from .model_io import state_record

if TYPE_CHECKING:
    from .local_sgd import LocalSGD

_SPIN_SECONDS, _LEAST_SHARE, _SHARED_TIMES, _SLEEP_SECONDS = 0.005, 0.8, 3, 0.1
"""`throttle` spins for the first number of seconds at a time. If it gets less than the given share
of the core in that many spins in a row, it sleeps for the last number of seconds.
"""

_PROBE_STEPS = 3
_MEASUREMENTS = 3


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished the work that this thread launched."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def throttle(start: float, slowdown: float, busy: bool = True) -> None:
    """Emulate a slower device: wait until work begun at `start` took `slowdown` times as long.

    In training, the core stays busy while waiting. Sleeping instead made the next steps 13 to 54 %
    longer (measured with ResNet8), which the slowdown then multiplied. If other processes need the
    core, the wait sleeps. It always sleeps after an evaluation, which is too long for cold caches
    to matter: a busy core would slow its neighbor, which a separate device does not.
    """
    if not busy:
        time.sleep((slowdown - 1) * (time.perf_counter() - start))
        return
    until, times_shared = start + slowdown * (time.perf_counter() - start), 0
    while (began := time.perf_counter()) < until:
        own, spin_until = time.thread_time(), min(until, began + _SPIN_SECONDS)
        while (now := time.perf_counter()) < spin_until:
            pass
        is_shared = time.thread_time() - own < _LEAST_SHARE * (now - began)
        times_shared = times_shared + 1 if is_shared else 0
        if times_shared >= _SHARED_TIMES and now < until:
            time.sleep(min(until - now, _SLEEP_SECONDS))


def seconds_per_step(sgd: "LocalSGD", batch_size: int, seconds: float = 1.0) -> float:
    """Measure the seconds of one training step, including an emulated slowdown.

    After a warm-up step, three steps show how many fit into `seconds`. If they took that long, they
    are the measurement; otherwise it is the median of three further orders that share this time.

    The orders are ordinary ones with a learning rate of 0. They do not affect training: each order
    brings its own weights, buffers and seed, and momentum is set to zero afterwards.
    """
    arrays = state_record(sgd.model)
    draw = np.random.default_rng(0)

    def measured(steps: int) -> float:
        order = TrainOrder.to_measure(steps, batch_size, len(sgd._source), arrays, draw)
        return sgd.run(order).compute_seconds / steps

    measured(1)
    step_seconds = measured(_PROBE_STEPS)
    if step_seconds * _PROBE_STEPS < seconds:
        steps = max(1, round(seconds / _MEASUREMENTS / step_seconds))
        step_seconds = statistics.median(measured(steps) for _ in range(_MEASUREMENTS))
    sgd.forget_momentum()
    return step_seconds
