"""Measure how long one local step takes here."""

import statistics

import numpy as np

from ..protocol import TrainOrder
from .gate import gate_of
from .local_sgd import LocalSGD
from .model_state import state_record

_PROBE_STEPS = 3
_CHUNKS = 3


def seconds_per_step(
    sgd: LocalSGD, batch_size: int, num_samples: int, seconds: float = 1.0
) -> float:
    """Return the seconds of one training step, with everything that slows it on purpose.

    One step to warm up is not counted. Then three steps say how many fit into `seconds`; if
    they alone took that long they are the measurement, else it is the median of three further
    orders that share that time.

    The orders are ordinary ones with made-up samples and a learning rate of 0, so they take
    as long as training does. Nothing that they leave reaches it: every order brings weights and
    buffers, random numbers are an order's own, and momentum is zero afterwards as before the
    first order.

    Parameters
    ----------
    sgd : LocalSGD
        What will train.
    batch_size, num_samples : int
        b_i and N.
    seconds : float (default: 1.0)
        About how long to measure.
    """
    with gate_of(sgd.device).computing():
        arrays = state_record(sgd.model)
    draw = np.random.default_rng(0)

    def measured(steps: int) -> float:
        order = TrainOrder(
            round=0,
            epoch=0,
            local_steps=steps,
            batch_size=batch_size,
            learning_rate=0.0,
            seed=0,
            deadline_seconds=0.0,
            momentum_policy="reset",
            indices=draw.integers(0, num_samples, steps * batch_size, dtype=np.int32),
            arrays=arrays,
        )
        return sgd.run(order).compute_seconds / steps

    measured(1)
    step_seconds = measured(_PROBE_STEPS)
    if step_seconds * _PROBE_STEPS < seconds:
        steps = max(1, round(seconds / _CHUNKS / step_seconds))
        step_seconds = statistics.median(measured(steps) for _ in range(_CHUNKS))
    sgd.forget_momentum()
    return step_seconds
