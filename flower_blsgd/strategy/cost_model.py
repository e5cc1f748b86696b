"""Predict how long a run takes before it starts, from seconds per step alone.

One round lasts as long as its slowest worker computes, and an overhead for moving and averaging
models. That is all: neither memory nor networks are modelled, so it also serves for hardware
that is not there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .biased_local_sgd import BiasedLocalSGD
from .workers import Worker


@dataclass(frozen=True)
class Prediction:
    """What to expect of a run.

    Attributes
    ----------
    workers : tuple of Worker
        Those that train; the tuples below are in their order.
    local_steps, batch_sizes : tuple of int
        tau_i and b_i.
    weights : tuple of float
        Shares of the average.
    waiting_shares : tuple of float
        Share of the round in which each waits.
    rounds_per_epoch : float
        On average.
    round_seconds, epoch_seconds : float
        With the overhead.
    fast_waiting_share, slow_waiting_share : float or None
        Means over a tier; None where no worker of it trains.
    samples_per_second : float
        Of all workers together.
    """

    workers: tuple[Worker, ...]
    local_steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    weights: tuple[float, ...]
    waiting_shares: tuple[float, ...]
    rounds_per_epoch: float
    round_seconds: float
    epoch_seconds: float
    fast_waiting_share: float | None
    slow_waiting_share: float | None
    samples_per_second: float


def predict_run(
    strategy: BiasedLocalSGD, workers: Sequence[Worker], overhead_seconds: float = 0.0
) -> Prediction | None:
    """Return what to expect of a strategy with these workers; None if a speed is not known.

    Parameters
    ----------
    strategy : BiasedLocalSGD
        Has the settings.
    workers : sequence of Worker
        All of them, in worker order.
    overhead_seconds : float (default: 0)
        Of one round: moving and averaging models.

    Raises
    ------
    UsageError
        If a run could not begin with these workers.
    """
    planner = strategy.planner
    training = planner.training(workers)
    if not all(worker.profile.seconds_per_step > 0 for worker in training):
        return None
    shape = planner.check(workers)
    loads = [samples / planner.batch_size for samples in shape.samples_per_round]
    computing = [
        load * worker.profile.seconds_per_step for load, worker in zip(loads, training, strict=True)
    ]
    longest = max(computing)
    round_seconds = longest + overhead_seconds
    waiting = tuple((longest - seconds) / round_seconds for seconds in computing)

    def tier_share(fast: bool) -> float | None:
        of_tier = [share for share, w in zip(waiting, training, strict=True) if w.fast is fast]
        return sum(of_tier) / len(of_tier) if of_tier else None

    rounds_per_epoch = planner.mean_rounds_per_epoch(shape)
    return Prediction(
        workers=tuple(training),
        local_steps=shape.local_steps,
        batch_sizes=shape.batch_sizes,
        weights=tuple(strategy.aggregation.weighting.weights(loads)),
        waiting_shares=waiting,
        rounds_per_epoch=rounds_per_epoch,
        round_seconds=round_seconds,
        epoch_seconds=round_seconds * rounds_per_epoch,
        fast_waiting_share=tier_share(True),
        slow_waiting_share=tier_share(False),
        samples_per_second=sum(shape.samples_per_round) / round_seconds,
    )


def predicted_figures(prediction: Prediction, clock: str) -> dict[str, float | str | None]:
    """Return what a summary shows beside the same figures as measured."""
    return {
        "clock": clock,
        "round_seconds": prediction.round_seconds,
        "epoch_seconds": prediction.epoch_seconds,
        "fast_waiting_share": prediction.fast_waiting_share,
        "slow_waiting_share": prediction.slow_waiting_share,
    }


def throughput_ceiling(workers: Sequence[Worker]) -> float | None:
    """Return how many times the samples per second of the fast workers all workers can do.

    The sum of all speeds over the sum of the fast ones; None without a fast one. No algorithm
    gets more samples per second out of the slow devices.
    """
    fast = sum(1 / worker.profile.seconds_per_step for worker in workers if worker.fast)
    return sum(1 / worker.profile.seconds_per_step for worker in workers) / fast if fast else None
