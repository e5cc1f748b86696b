"""Statistics of one epoch's choice of samples: losses of what was picked, ages of the records."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .epoch_plan import EpochPlan
from .local_steps import Participant
from .sampling import FloatArray, IntArray, LossTable

_NAN = float("nan")


@dataclass(frozen=True)
class SamplingStats:
    """Figures of one epoch's choice of samples, taken when it is planned.

    All losses are recorded ones, from earlier epochs; a sample that was never seen has none and
    counts in `share_never_seen` only. A loss or age without any record is nan: all are in epoch 1.
    Ages are in epochs, 0 for a loss of the round before this epoch; nine of ten are no older
    than the 90th percentile.

    Parameters
    ----------
    all_loss_mean, all_loss_p10, all_loss_p90 : float
        Mean, 10th and 90th percentile of the recorded losses.
    fast_picked_loss_mean, slow_picked_loss_mean : float
        Mean over the samples that a tier trains on; one that it has twice counts twice.
    picked_over_all_loss : float
        How biased the choice is: mean loss of all picked samples, of all workers, over the mean of
        all; 1 without bias.
    distinct_samples : int
        Different samples that are picked for any worker.
    share_never_seen : float
        Share of the N samples without a recorded loss.
    share_left_out : float
        Share of the N samples that no fast worker trains on.
    loss_age_epochs_mean, loss_age_epochs_p90, loss_age_epochs_max : float
        Age of the recorded losses.
    left_out_age_epochs_mean, left_out_age_epochs_p90 : float
        The same for the samples that no fast worker trains on.
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
    """Describe the choice of samples of one epoch. Linear in N; needs a byte per sample.

    Parameters
    ----------
    plan : EpochPlan
        The epoch.
    participants : sequence of Participant
        Those that it was planned for.
    table : LossTable
        As it was when the epoch was planned.
    last_round : int
        The last round before this epoch.
    rounds_per_epoch : float
        Of the epochs before this one, > 0; turns ages into epochs.

    Returns
    -------
    SamplingStats
        A pure function of the arguments.
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
    low, high = _deciles(recorded)
    all_mean = _mean(recorded)
    sums = [losses.sum(dtype=np.float64) for losses in (fast_losses, slow_losses)]
    num_picked = len(fast_losses) + len(slow_losses)
    picked_mean = float(sum(sums)) / num_picked if num_picked else _NAN
    return SamplingStats(
        all_loss_mean=all_mean,
        all_loss_p10=low,
        all_loss_p90=high,
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
    """Return the samples of a tier in the whole epoch, with repeats, in any order."""
    tier = [worker for worker, participant in enumerate(participants) if participant.fast is fast]
    orders = [plan.indices(r, worker) for r in range(plan.rounds) for worker in tier]
    return np.concatenate([np.empty(0, np.int32), *orders])


def _recorded(losses: FloatArray) -> FloatArray:
    return losses[np.isfinite(losses)]


def _mean(losses: FloatArray) -> float:
    return float(losses.mean(dtype=np.float64)) if len(losses) else _NAN


def _deciles(losses: FloatArray) -> tuple[float, float]:
    """Return the 10th and the 90th percentile as `numpy.percentile` does, to the bit but faster."""
    if not len(losses):
        return _NAN, _NAN
    last = len(losses) - 1
    around = [(int(share * last), min(int(share * last) + 1, last)) for share in (0.1, 0.9)]
    ordered = np.partition(losses, sorted({i for pair in around for i in pair}))
    low, high = (
        _between(ordered[below], ordered[above], share * last - below)
        for share, (below, above) in zip((0.1, 0.9), around, strict=True)
    )
    return low, high


def _between(below: np.float32, above: np.float32, share: float) -> float:
    step = float(above - below)
    return float(below) + step * share if share < 0.5 else float(above) - step * (1 - share)


def _ages(rounds: IntArray, last_round: int, rounds_per_epoch: float) -> tuple[float, float, float]:
    """Return mean, 90th percentile and maximum age of records, in epochs; nan without any."""
    seen = rounds[rounds > 0]  # round 0 stands for a sample that was never seen
    if not len(seen):
        return _NAN, _NAN, _NAN
    # The latest round with at most a tenth of the records before it.
    oldest_tenth = np.partition(seen, len(seen) // 10)[len(seen) // 10]
    mean, p90, maximum = (
        float(last_round - round_) / rounds_per_epoch
        for round_ in (seen.mean(dtype=np.float64), oldest_tenth, seen.min())
    )
    return mean, p90, maximum
