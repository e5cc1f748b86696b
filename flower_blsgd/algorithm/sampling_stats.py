"""Statistics of the chosen samples: the bias of the choice, and the age of the losses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .epoch_plan import EpochPlan
from .local_steps import Participant
from .loss_table import FloatArray, IntArray, LossTable

_NAN = float("nan")


@dataclass(frozen=True)
class SamplingStats:
    """Statistics of one choice of samples, usually for an epoch, at the time of the choice.

    Losses are those recorded before. A sample that was never seen has none, and does not count in
    means, percentiles and ages. Without any record, as in epoch 1, losses and ages are nan. Ages
    are in epochs; a loss from the round before the choice has age 0.

    Means over picked samples count repetitions. `picked_over_all_loss` is the bias of the choice:
    mean loss of the samples of all workers over the mean of all samples; 1 without bias.
    `distinct_samples` are those of all workers. Shares are of the N samples; the samples left out
    are those that no fast worker trains on.
    """

    all_loss_mean: float
    all_loss_p10: float
    all_loss_p90: float
    fast_picked_loss_mean: float
    slow_picked_loss_mean: float
    picked_over_all_loss: float
    distinct_samples: int
    share_never_seen: float
    share_left_out: float
    loss_age_epochs_mean: float
    loss_age_epochs_p90: float
    loss_age_epochs_max: float
    left_out_age_epochs_mean: float
    left_out_age_epochs_p90: float


def sampling_stats(
    plan: EpochPlan,
    participants: Sequence[Participant],
    table: LossTable,
    last_round: int,
    rounds_per_epoch: float,
) -> SamplingStats:
    """Return the statistics of the samples in a plan, from the table that the sampler saw.

    `last_round` is the last one before the choice, counted from 1. `rounds_per_epoch`, > 0,
    converts ages to epochs.
    """
    num_samples = len(table)
    fast, slow = (_picked(plan, participants, tier_is_fast) for tier_is_fast in (True, False))
    given = np.zeros(num_samples, np.bool_)
    given[fast] = True
    num_given_fast = int(np.count_nonzero(given))
    age_mean, age_p90, age_max = _ages(table.rounds, last_round, rounds_per_epoch)
    left_out_mean, left_out_p90, _ = _ages(table.rounds[~given], last_round, rounds_per_epoch)
    given[slow] = True
    recorded = _recorded(table.losses)
    fast_losses, slow_losses = (_recorded(table.losses[picked]) for picked in (fast, slow))
    low, high = np.percentile(recorded, [10, 90]) if len(recorded) else (_NAN, _NAN)
    all_mean = _mean(recorded)
    sums = [losses.sum(dtype=np.float64) for losses in (fast_losses, slow_losses)]
    num_picked = len(fast_losses) + len(slow_losses)
    picked_mean = float(sum(sums)) / num_picked if num_picked else _NAN
    return SamplingStats(
        all_loss_mean=all_mean,
        all_loss_p10=float(low),
        all_loss_p90=float(high),
        fast_picked_loss_mean=_mean(fast_losses),
        slow_picked_loss_mean=_mean(slow_losses),
        picked_over_all_loss=picked_mean / all_mean if all_mean > 0 else _NAN,
        distinct_samples=int(np.count_nonzero(given)),
        share_never_seen=1.0 - len(recorded) / num_samples,
        share_left_out=(num_samples - num_given_fast) / num_samples,
        loss_age_epochs_mean=age_mean,
        loss_age_epochs_p90=age_p90,
        loss_age_epochs_max=age_max,
        left_out_age_epochs_mean=left_out_mean,
        left_out_age_epochs_p90=left_out_p90,
    )


def _picked(plan: EpochPlan, participants: Sequence[Participant], fast: bool) -> IntArray:
    """Return the samples of a tier in all rounds of the lists, with repetitions."""
    whole = replace(plan, rounds=plan.lists_end - plan.first_round, first_round=0)
    tier = [worker for worker, participant in enumerate(participants) if participant.fast is fast]
    orders = [whole.indices(r, worker) for r in range(whole.rounds) for worker in tier]
    return np.concatenate([np.empty(0, np.int32), *orders])


def _recorded(losses: FloatArray) -> FloatArray:
    return losses[np.isfinite(losses)]


def _mean(losses: FloatArray) -> float:
    return float(losses.mean(dtype=np.float64)) if len(losses) else _NAN


def _ages(rounds: IntArray, last_round: int, rounds_per_epoch: float) -> tuple[float, float, float]:
    """Return mean, 90th percentile and maximum age of records, in epochs; nan without any."""
    seen = rounds[rounds > 0]  # round 0: a sample that was never seen
    if not len(seen):
        return _NAN, _NAN, _NAN
    # The latest round with at most a tenth of the records before it.
    oldest_tenth = np.partition(seen, len(seen) // 10)[len(seen) // 10]
    mean, p90, maximum = (
        float(last_round - round_) / rounds_per_epoch
        for round_ in (seen.mean(dtype=np.float64), oldest_tenth, seen.min())
    )
    return mean, p90, maximum
