"""What an epoch's choice of samples looks like: losses of what was picked, ages of the records."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .block_draws import BLOCK_SAMPLES, blocks
from .epoch_plan import EpochPlan
from .local_steps import Participant
from .loss_table import FloatArray, IntArray, LossTable
from .order_statistics import values_at

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
    given = np.zeros(num_samples, np.bool_)
    fast = _read_picked(plan, participants, table, given, fast=True)
    num_given_fast = int(np.count_nonzero(given))
    all_ages, left_out_ages = _ages(table.rounds, given, last_round)
    slow = _read_picked(plan, participants, table, given, fast=False)
    recorded = _RecordedLosses()
    for part in blocks(num_samples):
        recorded.add(table.losses[part])
    low, high = _percentiles(table, recorded.count, (10, 90))
    picked_mean = _RecordedLosses(fast.total + slow.total, fast.count + slow.count).mean
    return SamplingStats(
        all_loss_mean=recorded.mean,
        all_loss_p10=low,
        all_loss_p90=high,
        fast_picked_loss_mean=fast.mean,
        slow_picked_loss_mean=slow.mean,
        picked_over_all_loss=picked_mean / recorded.mean if recorded.mean > 0 else _NAN,
        distinct_samples=int(np.count_nonzero(given)),
        share_never_seen=1.0 - recorded.count / num_samples,
        share_left_out=(num_samples - num_given_fast) / num_samples,
        loss_age_epochs_mean=all_ages.mean / rounds_per_epoch,
        loss_age_epochs_p90=all_ages.p90 / rounds_per_epoch,
        loss_age_epochs_max=all_ages.maximum / rounds_per_epoch,
        left_out_age_epochs_mean=left_out_ages.mean / rounds_per_epoch,
        left_out_age_epochs_p90=left_out_ages.p90 / rounds_per_epoch,
    )


@dataclass
class _RecordedLosses:
    """Sum and number of recorded losses; infinity is none."""

    total: float = 0.0
    count: int = 0

    def add(self, losses: FloatArray) -> None:
        recorded = np.isfinite(losses)
        # Three times as fast as to pick out a random part.
        self.total += float(np.where(recorded, losses, np.float32(0)).sum(dtype=np.float64))
        self.count += int(np.count_nonzero(recorded))

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else _NAN


def _read_picked(
    plan: EpochPlan,
    participants: Sequence[Participant],
    table: LossTable,
    given: npt.NDArray[np.bool_],
    fast: bool,
) -> _RecordedLosses:
    """Mark in `given` what a tier is given in the whole epoch, and add up its losses."""
    recorded = _RecordedLosses()
    for indices in _picked(plan, participants, fast):
        for part in blocks(len(indices)):
            places = indices[part].astype(np.intp)  # once, not for each use
            given[places] = True
            recorded.add(table.losses.take(places))
    return recorded


def _picked(plan: EpochPlan, participants: Sequence[Participant], fast: bool) -> Iterator[IntArray]:
    """Yield what a tier is given in the whole epoch, in any order and in parts."""
    per_round = plan.shape.samples_per_round
    for pool in plan.pools:
        ours = [participants[member].fast is fast for member in pool.members]
        columns = np.repeat(ours, [per_round[member] for member in pool.members])
        dealt = pool.indices[: plan.rounds * len(columns)]
        if all(ours):
            yield dealt
        elif any(ours):
            rounds = dealt.reshape(plan.rounds, len(columns))
            at_once = max(1, BLOCK_SAMPLES // len(columns))
            for first in range(0, plan.rounds, at_once):
                yield rounds[first : first + at_once, columns].ravel()


def _percentiles(table: LossTable, num_recorded: int, percents: Sequence[int]) -> list[float]:
    """Return percentiles of the recorded losses, between two of them in proportion."""
    if not num_recorded:
        return [_NAN] * len(percents)
    exact = [percent / 100 * (num_recorded - 1) for percent in percents]
    places = [place for at in exact for place in (math.floor(at), math.ceil(at))]
    # Those without a loss are infinite: they rank behind all places.
    found = values_at(table.losses, places).astype(np.float64).reshape(-1, 2)
    return [
        float(low + (high - low) * (at - math.floor(at)))
        for at, (low, high) in zip(exact, found, strict=True)
    ]


@dataclass(frozen=True)
class _Ages:
    """Of recorded losses, in rounds; nan without any."""

    mean: float = _NAN
    p90: float = _NAN
    maximum: float = _NAN


def _ages(rounds: IntArray, given: npt.NDArray[np.bool_], last_round: int) -> tuple[_Ages, _Ages]:
    """Return the ages of all losses, and of those of the samples that are not given."""
    num_rounds = int(rounds.max()) + 1
    all_counts, left_out_counts = np.zeros((2, num_rounds), np.int64)
    for part in blocks(len(rounds)):
        for counts, chosen in (
            (all_counts, rounds[part]),
            (left_out_counts, rounds[part][~given[part]]),
        ):
            found = np.bincount(chosen, minlength=1)
            counts[: len(found)] += found
    return _ages_of(all_counts, last_round), _ages_of(left_out_counts, last_round)


def _ages_of(counts: npt.NDArray[np.int64], last_round: int) -> _Ages:
    """Return the ages, given how many losses each round recorded."""
    counts[0] = 0  # round 0 stands for a sample that was never seen
    total = int(counts.sum())
    if not total:
        return _Ages()
    mean = float(counts @ np.arange(len(counts))) / total
    # The latest round with at most a tenth of the records before it.
    oldest_tenth = int(np.searchsorted(10 * np.cumsum(counts), total, side="right"))
    oldest = int(np.flatnonzero(counts)[0])
    return _Ages(last_round - mean, float(last_round - oldest_tenth), float(last_round - oldest))
