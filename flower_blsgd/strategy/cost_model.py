"""Predict the duration of a run from seconds per step.

A round takes the computing time of its slowest worker, plus an overhead for moving and averaging
models. Memory and networks are not modelled, so predictions work for hardware that is not present.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..algorithm.averaging import Weighting, best_speed_up
from ..algorithm.validation import checked_weights
from .biased_local_sgd import BiasedLocalSGD
from .round_metrics import WorkerRound, waiting_share
from .workers import Worker


@dataclass(frozen=True)
class Prediction:
    """Predicted mean round of a run.

    `workers` has a row for each worker that trains. `round_seconds` includes the overhead, and
    `rounds_per_epoch` is a mean. `best_speed_up` is the upper bound of the speed-up over the fast
    workers alone, see `averaging.best_speed_up`; None without a fast worker.
    """

    workers: tuple[WorkerRound, ...]
    round_seconds: float
    rounds_per_epoch: float
    best_speed_up: float | None = None

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all workers together."""
        return sum(row.num_examples for row in self.workers) / self.round_seconds

    @property
    def epoch_seconds(self) -> float:
        """Mean duration of an epoch."""
        return self.round_seconds * self.rounds_per_epoch

    def waiting_share(self, fast: bool) -> float | None:
        """Return the share of time that a tier waits; None if none of its workers trains."""
        return waiting_share([(self.round_seconds, self.workers)], fast)


def predict_run(
    strategy: BiasedLocalSGD, workers: Sequence[Worker], overhead_seconds: float = 0.0
) -> Prediction | None:
    """Predict a run of a strategy with all these workers; None if a speed is unknown.

    `overhead_seconds` is the duration of a round without computing. UsageError if a run cannot
    begin with these workers.
    """
    planner, weighting = strategy.planner, copy.deepcopy(strategy.averaging.weighting)
    training, batch_size = planner.training(workers), planner.settings.batch_size
    if not all(worker.profile.seconds_per_step > 0 for worker in training):
        return None
    planner.check(workers)
    shape = planner.shape(workers, planner.fewest_steps(workers, overhead_seconds))
    samples = shape.samples_per_round
    weights = checked_weights(weighting, [float(count) for count in samples])
    sizes = [worker.own_batch(batch_size) for worker in training]
    computing = planner.computing_seconds(training, shape)
    rows = [
        WorkerRound(
            worker=worker.index,
            label=worker.label,
            fast=worker.fast,
            local_steps=shape.local_steps[rank],
            num_examples=samples[rank],
            weight=weights[rank],
            compute_seconds=computing[rank],
            waiting_seconds=max(computing) - computing[rank],
        )
        for rank, worker in enumerate(training)
    ]
    speeds = [worker.samples_per_second(batch_size) for worker in training]
    fast = [worker.fast for worker in training]
    return Prediction(
        tuple(rows),
        max(computing) + overhead_seconds,
        shape.table_rounds or max(1.0, planner.settings.num_samples / sum(samples)),
        best_speed_up(weighting, speeds, sizes, fast) if any(fast) else None,
    )


# --- what a slow device should do ----------------------------------------------------------------

NEGLIGIBLE = 0.01
"""A worker with a smaller weight, or a smaller gain, contributes too little to matter."""

_OF_GAIN = 0.35
"""Share of the largest possible gain that training reached on a counted clock: a third at half the
speed of the fast device, two fifths at a quarter (``benchmarks/study/RESULTS2.md``). On the wall
clock, images reached more and a language model less (``benchmarks/study/RESULTS3.md``).
"""


def slow_device_lines(
    speeds: Sequence[tuple[Worker, float]],
    batch_size: int,
    weighting: Weighting,
    evaluation_share: float,
) -> list[str]:
    """Return a line with the best role of each worker that is slow or evaluates.

    The gain from training is 0.35 of that which the upper bounds with and without the worker allow.
    The gain from evaluating is the time that it saves the training workers.

    `speeds` are the workers and their samples per second in training, in worker order.
    `evaluation_share` is the seconds of evaluating per second of training, by the same workers.
    Both are 0 if unknown. There are no lines if a custom weighting fails with fewer workers.
    """
    weighting = copy.deepcopy(weighting)  # it may have a state

    def ceiling(group: Sequence[tuple[Worker, float]]) -> float:
        sizes = [worker.own_batch(batch_size) for worker, _ in group]
        fast = [worker.trains and worker.fast for worker, _ in group]
        try:
            return best_speed_up(weighting, [speed for _, speed in group], sizes, fast)
        except Exception:
            return math.nan

    lines, known = [], [pair for pair in speeds if pair[1]]
    for worker, speed in known:
        others = [pair for pair in known if pair[0].trains and pair[0] is not worker]
        if (worker.trains and worker.fast) or not any(other.fast for other, _ in others):
            continue
        group = [pair for pair in known if pair[0].trains or pair[0] is worker]
        bound = ceiling(group) / ceiling(others)
        if math.isnan(bound):
            continue
        gains = {"training": 1 + _OF_GAIN * (bound - 1)}
        if evaluation_share:
            relative = speed / sum(speed for _, speed in others)
            gains["role=evaluate"] = 1 + min(evaluation_share, relative)
        best = max(gains, key=gains.__getitem__)
        use = f"best used for {best}" if gains[best] >= 1 + NEGLIGIBLE else "best left out"
        figures = ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
        lines.append(f"{worker.label}: {use} (expected speed-up: {figures})")
    return lines
