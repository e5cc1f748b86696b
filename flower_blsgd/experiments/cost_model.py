"""What to expect of a run before it starts, from seconds per step alone.

One round lasts as long as its slowest worker computes, and an overhead for moving and averaging
models. That is all: neither memory nor networks are modelled, so it also serves for hardware
that is not there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..algorithm.averaging import Weighting
from ..algorithm.epoch_plan import RoundShape


@dataclass(frozen=True)
class Speed:
    """What is known of one worker.

    Parameters
    ----------
    seconds_per_step : float
        For a step of the common batch size, > 0.
    fast : bool
        Its tier.
    trains : bool (default: True)
        Whether it gets orders.
    """

    seconds_per_step: float
    fast: bool
    trains: bool = True


@dataclass(frozen=True)
class Prediction:
    """What to expect.

    Parameters
    ----------
    local_steps, batch_sizes : tuple of int
        tau_i and b_i of the workers that train, in worker order.
    loads : tuple of float
        Work per round in steps of the common batch size.
    weights : tuple of float
        Shares of the average.
    waiting_shares : tuple of float
        Share of the round in which each waits.
    rounds_per_epoch : float
        On average.
    round_seconds, epoch_seconds : float
        With the overhead.
    fast_waiting_share, slow_waiting_share : float or None
        Means over a tier; None where nobody of it trains.
    samples_per_second : float
        Of all workers together.
    """

    local_steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    loads: tuple[float, ...]
    weights: tuple[float, ...]
    waiting_shares: tuple[float, ...]
    rounds_per_epoch: float
    round_seconds: float
    epoch_seconds: float
    fast_waiting_share: float | None
    slow_waiting_share: float | None
    samples_per_second: float


def predict(
    speeds: Sequence[Speed],
    shape: RoundShape,
    weighting: Weighting,
    *,
    batch_size: int,
    rounds_per_epoch: float,
    overhead_seconds: float = 0.0,
) -> Prediction:
    """Return what to expect of a run.

    Parameters
    ----------
    speeds : sequence of Speed
        Of the workers that train, in worker order.
    shape : RoundShape
        Their steps and batch sizes.
    weighting : Weighting
        Turns loads into weights.
    batch_size : int
        B.
    rounds_per_epoch : float
        Of an average epoch.
    overhead_seconds : float (default: 0)
        Of one round: moving and averaging models.

    Examples
    --------
    A fast worker with 32 steps of 10 ms beside one that is 16 times slower and does 2:

    >>> from ..algorithm.averaging import LoadWeighting
    >>> speeds = [Speed(0.01, True), Speed(0.16, False)]
    >>> shape = RoundShape((32, 2), (16, 16))
    >>> found = predict(speeds, shape, LoadWeighting(), batch_size=16, rounds_per_epoch=10)
    >>> round(found.round_seconds, 3), found.fast_waiting_share, round(found.weights[1], 3)
    (0.32, 0.0, 0.059)
    """
    loads = tuple(samples / batch_size for samples in shape.samples_per_round)
    computing = [load * s.seconds_per_step for load, s in zip(loads, speeds, strict=True)]
    longest = max(computing)
    round_seconds = longest + overhead_seconds
    waiting = tuple((longest - seconds) / round_seconds for seconds in computing)

    def tier_share(fast: bool) -> float | None:
        of_tier = [w for w, s in zip(waiting, speeds, strict=True) if s.fast is fast]
        return sum(of_tier) / len(of_tier) if of_tier else None

    return Prediction(
        local_steps=shape.local_steps,
        batch_sizes=shape.batch_sizes,
        loads=loads,
        weights=tuple(weighting.weights(list(loads))),
        waiting_shares=waiting,
        rounds_per_epoch=rounds_per_epoch,
        round_seconds=round_seconds,
        epoch_seconds=round_seconds * rounds_per_epoch,
        fast_waiting_share=tier_share(True),
        slow_waiting_share=tier_share(False),
        samples_per_second=sum(shape.samples_per_round) / round_seconds,
    )


def ceiling(speeds: Sequence[Speed]) -> float | None:
    """Return how much more all workers can do than the fast ones alone, at best.

    The sum of all speeds over the sum of the fast ones; None without a fast one. No algorithm
    gets more samples per second out of the slow devices.

    >>> eight_gpus_and_two_slow = [Speed(1.0, True)] * 8 + [Speed(22.0, False)] * 2
    >>> round(ceiling(eight_gpus_and_two_slow), 3)
    1.011
    """
    fast = sum(1 / speed.seconds_per_step for speed in speeds if speed.fast)
    return sum(1 / speed.seconds_per_step for speed in speeds) / fast if fast else None
