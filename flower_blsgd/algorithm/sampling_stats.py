"""What an epoch's choice of samples looks like: losses of what was picked, ages of the records."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .epoch_plan import EpochPlan
from .local_steps import Participant
from .loss_table import IntArray, LossTable

_NAN = float("nan")


@dataclass(frozen=True)
class SamplingStats:
    """Figures of one epoch's choice of samples, taken when it is planned.

    All losses are recorded ones, from earlier epochs; a sample that was never seen has none and
    counts in `share_never_seen` only. What nothing is known of is nan: everything in epoch 1.
    Ages are in epochs, 0 for a loss of the round before this epoch; nine of ten are no older
    than the 90th percentile.

    Parameters
    ----------
    all_loss_mean, all_loss_p10, all_loss_p90 : float
        Mean, 10th and 90th percentile of the recorded losses.
    fast_picked_loss_mean, slow_picked_loss_mean : float
        Mean over the samples that a tier is given; one that it is given twice counts twice.
    picked_over_all_loss : float
        The bias meter: mean over everything that is picked, for all workers, over the mean of
        all; 1 without bias.
    distinct_samples : int
        Different samples that are picked, for all workers.
    share_never_seen : float
        Share of the N samples without a recorded loss.
    share_left_out : float
        Share of the N samples that no fast worker is given.
    loss_age_epochs_mean, loss_age_epochs_p90, loss_age_epochs_max : float
        Age of the recorded losses.
    left_out_age_epochs_mean, left_out_age_epochs_p90 : float
        The same for the samples that no fast worker is given.
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
    """Describe the choice of samples of one epoch. Linear in N.

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
    for_fast = _picked(plan, participants, fast=True)
    for_slow = _picked(plan, participants, fast=False)
    picked = np.zeros(num_samples, np.bool_)
    picked[for_fast] = picked[for_slow] = True
    left_out = np.ones(num_samples, np.bool_)
    left_out[for_fast] = False
    losses = table.losses[np.isfinite(table.losses)]
    low, high = np.percentile(losses, [10, 90]) if len(losses) else (_NAN, _NAN)
    age_mean, age_p90, age_max = _ages(table.rounds, last_round)
    old_mean, old_p90, _ = _ages(table.rounds[left_out], last_round)
    all_mean = _mean(losses)
    picked_mean = _mean_of_seen(table, np.concatenate([for_fast, for_slow]))
    return SamplingStats(
        all_loss_mean=all_mean,
        all_loss_p10=float(low),
        all_loss_p90=float(high),
        fast_picked_loss_mean=_mean_of_seen(table, for_fast),
        slow_picked_loss_mean=_mean_of_seen(table, for_slow),
        picked_over_all_loss=picked_mean / all_mean if all_mean > 0 else _NAN,
        distinct_samples=int(np.count_nonzero(picked)),
        share_never_seen=1.0 - len(losses) / num_samples,
        share_left_out=float(np.count_nonzero(left_out)) / num_samples,
        loss_age_epochs_mean=age_mean / rounds_per_epoch,
        loss_age_epochs_p90=age_p90 / rounds_per_epoch,
        loss_age_epochs_max=age_max / rounds_per_epoch,
        left_out_age_epochs_mean=old_mean / rounds_per_epoch,
        left_out_age_epochs_p90=old_p90 / rounds_per_epoch,
    )


def _picked(plan: EpochPlan, participants: Sequence[Participant], fast: bool) -> IntArray:
    """Return what a tier is given in the whole epoch, in any order."""
    per_round = plan.shape.samples_per_round
    picked = [np.empty(0, np.int32)]
    for pool in plan.pools:
        ours = [participants[member].fast is fast for member in pool.members]
        columns = np.repeat(ours, [per_round[member] for member in pool.members])
        rounds = pool.indices[: plan.rounds * len(columns)].reshape(plan.rounds, len(columns))
        # No mask where the pool is one tier's alone: the list may be as long as N.
        picked.append((rounds if all(ours) else rounds[:, columns]).ravel())
    return np.concatenate(picked)


def _mean(losses: npt.NDArray[np.float32]) -> float:
    return float(losses.mean(dtype=np.float64)) if len(losses) else _NAN


def _mean_of_seen(table: LossTable, indices: IntArray) -> float:
    losses = table.losses[indices]
    return _mean(losses[np.isfinite(losses)])


def _ages(rounds: IntArray, last_round: int) -> tuple[float, float, float]:
    """Return the mean age, its 90th percentile and the maximum, in rounds; nan without any."""
    counts = np.bincount(rounds, minlength=1)
    counts[0] = 0  # round 0 stands for a sample that was never seen
    total = int(counts.sum())
    if not total:
        return _NAN, _NAN, _NAN
    mean = float(counts @ np.arange(len(counts))) / total
    # The latest round with at most a tenth of the records before it.
    oldest_tenth = int(np.searchsorted(10 * np.cumsum(counts), total, side="right"))
    oldest = int(np.flatnonzero(counts)[0])
    return last_round - mean, float(last_round - oldest_tenth), float(last_round - oldest)
