"""Choose the samples of one epoch for fast and slow workers, by their recorded losses.

A sampler makes the sample lists of an epoch, usually one per tier: sample indices, and the workers
that share them. ``epoch_plan`` cuts each list into rounds. To add a sampler, subclass `Sampler`,
implement ``sample_lists`` and pass an instance to the strategy. Built-in samplers are rows of
``SAMPLERS`` in ``catalog.py``.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from .local_steps import Participant
from .loss_table import FloatArray, IntArray, LossTable
from .randomness import generator

TierName = Literal["fast", "slow"]

HIGH_LOSS_RATIO = 0.5
"""Default of lambda."""

DRAWS = {"fast": "fast-samples", "slow": "slow-samples"}
"""Purpose of each tier's draw, for `generator`."""


def highest_losses(
    losses: FloatArray, count: int, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Mark the `count` highest losses; ties are broken at random.

    `losses`, of shape (N,), has no nan; infinity ranks highest. `count` lies in [0, N].
    """
    num_samples = len(losses)
    if count == 0:
        return np.zeros(num_samples, np.bool_)
    threshold = np.partition(losses, num_samples - count)[num_samples - count]
    marked: npt.NDArray[np.bool_] = losses > threshold
    if missing := count - int(np.count_nonzero(marked)):
        ties = np.flatnonzero(losses == threshold)
        marked[rng.choice(ties, missing, replace=False, shuffle=False)] = True
    return marked


def draw_samples(
    losses: FloatArray, count: int, high_loss_ratio: float, rng: np.random.Generator
) -> IntArray:
    """Draw `count` samples, a share of them by highest loss, and shuffle them.

    If `count` exceeds N, all N samples come first, shuffled; the same rule then draws the rest.
    Until all N samples are drawn, no index repeats. `losses`, of shape (N,), has infinity for a
    sample that was never seen. `high_loss_ratio`, in [0, 1], is the share chosen by loss; the rest
    is drawn uniformly from the others.
    """
    drawn = np.empty(count, np.int32)
    for start in range(0, count, len(losses)):
        part = drawn[start : start + len(losses)]
        if len(part) == len(losses):
            part[:] = rng.permutation(len(losses))
            continue
        num_high = int(high_loss_ratio * len(part) + 0.5)
        high = highest_losses(losses, num_high, rng)
        rest = rng.choice(np.flatnonzero(~high), len(part) - num_high, replace=False, shuffle=False)
        chosen = np.concatenate([np.flatnonzero(high), rest])
        rng.shuffle(chosen)
        part[:] = chosen
    return drawn


@functools.lru_cache(maxsize=2)  # a session asks for a part of it in every round
def _permutation(seed: int, num_samples: int, number: int) -> IntArray:
    drawn = generator(seed, "permutation", number).permutation(num_samples).astype(np.int32)
    drawn.flags.writeable = False
    return drawn


def permutation_stream(seed: int, num_samples: int, start: int, count: int) -> IntArray:
    """Return elements [start, start + count) of the endless stream of permutations of N samples."""
    parts = [np.empty(0, np.int32)]
    while count > 0:
        number, offset = divmod(start, num_samples)
        parts.append(_permutation(seed, num_samples, number)[offset : offset + count])
        start, count = start + len(parts[-1]), count - len(parts[-1])
    return np.concatenate(parts)


@dataclass(frozen=True)
class SampleList:
    """Sample indices of a whole epoch, and the workers that share them.

    Parameters
    ----------
    indices : numpy.ndarray
        int32, in the order of training.
    members : tuple of int
        Indices of the workers in `EpochRequest.participants`, ascending.
    """

    indices: IntArray
    members: tuple[int, ...]


@dataclass(frozen=True)
class EpochRequest:
    """The epoch that a sampler chooses samples for.

    Parameters
    ----------
    seed : int
        The run's seed.
    epoch : int
        Counted from 1.
    rounds : int
        Number of communication rounds that the lists are for: the epoch, or the rest of it.
    participants : tuple of Participant
        All workers that train, in worker order.
    samples_per_round : tuple of int
        tau_i b_i of each participant.
    samples_before : int
        Samples that were planned before the first of these rounds, in this epoch and all earlier
        ones. With a selection: earlier epochs x samples selected for this epoch, so that every
        epoch begins a new permutation.
    """

    seed: int
    epoch: int
    rounds: int
    participants: tuple[Participant, ...]
    samples_per_round: tuple[int, ...]
    samples_before: int

    def tier(self, fast: bool) -> tuple[int, ...]:
        """Return the indices of the fast workers, or of the slow ones, ascending."""
        return tuple(i for i, p in enumerate(self.participants) if p.fast is fast)

    def set_size(self, members: Sequence[int]) -> int:
        """Return the number of samples of these workers in all rounds."""
        return self.rounds * sum(self.samples_per_round[i] for i in members)


class Sampler(Protocol):
    """Rule that chooses the samples of one epoch. Subclass it and implement `sample_lists`."""

    needs_both_tiers: bool = False
    """Whether a run must start with at least one fast and one slow worker."""
    is_stream: bool = False
    """Whether all workers share one list, which continues `permutation_stream`."""

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return the epoch's lists; every participant is a member of exactly one."""
        ...


@dataclass(frozen=True)
class UniformSampler(Sampler):
    """One endless stream of seeded permutations for all workers (the unbiased algorithms).

    An epoch may end inside a permutation; the next one continues it.
    """

    is_stream = True

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return one list, shared by all workers."""
        members = tuple(range(len(request.participants)))
        count = request.set_size(members)
        indices = permutation_stream(request.seed, len(table), request.samples_before, count)
        return [SampleList(indices, members)]


@dataclass(frozen=True)
class SeparatedSampler(Sampler):
    """High-loss and uniformly drawn samples for one tier, only uniform ones for the other.

    The paper's method. The draws of the two tiers are independent, so they may overlap.

    Parameters
    ----------
    high_loss_ratio : float (default: HIGH_LOSS_RATIO)
        lambda: share of the tier's samples with the highest recorded losses, in [0, 1]; the rest
        is drawn uniformly.
    high_loss_to : {"fast", "slow"} (default: "fast")
        Tier that gets the high-loss samples; in the paper the fast one.
    """

    needs_both_tiers = True
    disjoint: ClassVar[bool] = False
    """Whether the other tier gets the remaining samples, as far as they suffice."""

    high_loss_ratio: float = HIGH_LOSS_RATIO
    high_loss_to: TierName = "fast"

    def __post_init__(self) -> None:
        if not 0.0 <= self.high_loss_ratio <= 1.0:  # also refuses nan
            raise ValueError(f"high_loss_ratio = {self.high_loss_ratio} must lie in [0, 1]")
        if self.high_loss_to not in DRAWS:
            raise ValueError(
                f"high_loss_to = {self.high_loss_to!r} must be one of {', '.join(DRAWS)}"
            )

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return the fast workers' list and the slow workers' list."""
        sample_lists = {}
        losses = table.ranking_losses()
        taken = np.zeros(len(table), np.bool_)
        by_loss_first = sorted(DRAWS.items(), key=lambda draw: draw[0] != self.high_loss_to)
        for tier, purpose in by_loss_first:
            members = request.tier(tier == "fast")
            if not members:
                continue
            rng = generator(request.seed, purpose, request.epoch)
            ratio = self.high_loss_ratio if tier == self.high_loss_to else 0.0
            count = request.set_size(members)
            if self.disjoint and tier != self.high_loss_to:
                left = np.flatnonzero(~taken)
                rng.shuffle(left)
                more = draw_samples(losses, max(0, count - len(left)), ratio, rng)
                indices = np.concatenate([left[:count].astype(np.int32), more])
            else:
                indices = draw_samples(losses, count, ratio, rng)
                taken[indices] = True
            sample_lists[tier] = SampleList(indices, members)
        return [sample_lists[tier] for tier in DRAWS if tier in sample_lists]


@dataclass(frozen=True)
class UnifiedSampler(SeparatedSampler):
    """High-loss and uniformly drawn samples for one tier, the remaining ones for the other.

    No sample is in both draws, unless too few samples remain for the other tier. The missing ones
    are then drawn uniformly from all samples. The parameters are those of `SeparatedSampler`.
    """

    disjoint: ClassVar[bool] = True
