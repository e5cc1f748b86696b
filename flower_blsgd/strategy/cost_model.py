"""Predict how long a run takes before it starts, from seconds per step alone.

One round lasts as long as its slowest worker computes, and an overhead for moving and averaging
models. That is all: neither memory nor networks are modelled, so it also serves for hardware
that is not there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..algorithm.averaging import Weighting, best_speed_up
from ..algorithm.own_parts import checked_weights
from .biased_local_sgd import BiasedLocalSGD
from .round_metrics import WorkerRound, waiting_share
from .workers import Worker


@dataclass(frozen=True)
class Prediction:
    """What to expect of a run: an average round.

    Attributes
    ----------
    workers : tuple of WorkerRound
        The part of each worker that trains: its steps, samples, weight and seconds.
    round_seconds : float
        With the overhead.
    rounds_per_epoch : float
        On average.
    best_speed_up : float, optional
        How many times sooner than the fast workers alone these may reach a loss at most, by their
        weights: `averaging.best_speed_up`; None without a fast worker.
    """

    workers: tuple[WorkerRound, ...]
    round_seconds: float
    rounds_per_epoch: float
    best_speed_up: float | None = None

    @property
    def samples_per_second(self) -> float:
        """Of all workers together."""
        return sum(row.num_examples for row in self.workers) / self.round_seconds

    @property
    def epoch_seconds(self) -> float:
        """Of an average epoch."""
        return self.round_seconds * self.rounds_per_epoch

    def waiting_share(self, fast: bool) -> float | None:
        """Return the mean over a tier; None where no worker of it trains."""
        return waiting_share([(self.round_seconds, self.workers)], fast)


def predict_run(
    strategy: BiasedLocalSGD, workers: Sequence[Worker], overhead_seconds: float = 0.0
) -> Prediction | None:
    """Return what to expect of a strategy with these workers; None if a speed is not known.

    The workers are all of them, in worker order; `overhead_seconds` of a round is moving and
    averaging models. UsageError if a run could not begin with these workers.
    """
    planner = strategy.planner
    training = planner.training(workers)
    if not all(worker.profile.seconds_per_step > 0 for worker in training):
        return None
    planner.check(workers)
    shape = planner.shape(workers, planner.fewest_steps(workers, overhead_seconds))
    loads = [samples / planner.batch_size for samples in shape.samples_per_round]
    weights = checked_weights(strategy.averaging.weighting, loads)
    computing = [
        samples / worker.own_batch(planner.batch_size) * worker.profile.seconds_per_step
        for samples, worker in zip(shape.samples_per_round, training, strict=True)
    ]
    rows = [
        WorkerRound(
            worker=worker.index,
            label=worker.label,
            fast=worker.fast,
            local_steps=shape.local_steps[rank],
            num_examples=shape.samples_per_round[rank],
            weight=weights[rank],
            compute_seconds=computing[rank],
            waiting_seconds=max(computing) - computing[rank],
        )
        for rank, worker in enumerate(training)
    ]
    speeds = [worker.samples_per_second(planner.batch_size) for worker in training]
    sizes = [worker.own_batch(planner.batch_size) for worker in training]
    fast = [worker.fast for worker in training]
    return Prediction(
        tuple(rows),
        max(computing) + overhead_seconds,
        planner.mean_rounds_per_epoch(shape),
        best_speed_up(strategy.averaging.weighting, speeds, sizes, fast) if any(fast) else None,
    )


def predicted_figures(prediction: Prediction, clock: str) -> dict[str, float | str | None]:
    """Return what a summary shows beside the same figures as measured."""
    return {
        "clock": clock,
        "round_seconds": prediction.round_seconds,
        "epoch_seconds": prediction.epoch_seconds,
        "fast_waiting_share": prediction.waiting_share(fast=True),
        "slow_waiting_share": prediction.waiting_share(fast=False),
    }


# --- what a slow device should do ----------------------------------------------------------------

HARDLY = 0.01
"""A worker whose weight, or gain, is below this hardly takes part."""

_OF_CEILING = 0.95
"""Share of the ceiling that training reaches: ``local-steps-fast = "auto"`` gives up 5 %."""


def slow_device_lines(
    speeds: Sequence[tuple[Worker, float]],
    batch_size: int,
    weighting: Weighting,
    evaluation_share: float,
) -> list[str]:
    """Return for each worker that is slow, or evaluates, the role it is worth, and how much.

    If it trains: 0.95 of the ceiling of the weights with it, over that without it. If it evaluates:
    what this saves the others that train, at most as long as they take for what it can do.

    Parameters
    ----------
    speeds : sequence of tuple of Worker and float
        Each worker and its samples per second in training; 0 if that is not known.
    batch_size, weighting : int, Weighting
        The run's.
    evaluation_share : float
        Seconds of evaluating per second of training, by the same workers; 0 if not known.
    """

    def ceiling(group: Sequence[tuple[Worker, float]]) -> float:
        sizes = [worker.own_batch(batch_size) for worker, _ in group]
        fast = [worker.trains and worker.fast for worker, _ in group]
        return best_speed_up(weighting, [speed for _, speed in group], sizes, fast)

    lines, known = [], [pair for pair in speeds if pair[1]]
    for worker, speed in known:
        others = [pair for pair in known if pair[0].trains and pair[0] is not worker]
        if (worker.trains and worker.fast) or not any(other.fast for other, _ in others):
            continue
        gains = {"training": _OF_CEILING * ceiling([*others, (worker, speed)]) / ceiling(others)}
        if evaluation_share:
            relative = speed / sum(speed for _, speed in others)
            gains["role=evaluate"] = 1 + min(evaluation_share, relative)
        best = max(gains, key=gains.__getitem__)
        use = f"best used for {best}" if gains[best] >= 1 + HARDLY else "best left out"
        figures = ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
        lines.append(f"{worker.label}: {use} (expected speed-up: {figures})")
    return lines
