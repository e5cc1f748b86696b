"""Choose the samples of one epoch for fast and slow workers, by their recorded losses.

A sampler makes the sample lists of an epoch, commonly one for each tier: sample indices, and the
workers that share them. ``epoch_plan`` cuts each list into rounds. To add a sampler, subclass
`Sampler`, write ``sample_lists``, and pass an instance to the strategy; a built-in one is a row of
``SAMPLERS`` in ``catalog.py``.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from .local_steps import Participant

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
TierName = Literal["fast", "slow"]

HIGH_LOSS_RATIO = 0.5
"""The default of lambda."""

UNSEEN = np.float32(np.inf)
"""The loss of a sample that was never seen: it ranks above every number."""

_MOST_FAILURES = 2
"""After so many failed orders a sample without a recorded loss is ranked at the median."""

_DRAWS = {"fast": "fast-samples", "slow": "slow-samples"}
"""The purpose of each tier's draw, for its random generator."""


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return the generator of one draw.

    Every random draw is a pure function of the seed, a purpose and a few counters: a resumed run, a
    second run and another engine draw the same numbers, and adding a draw for one purpose moves
    no draw for another.

    Parameters
    ----------
    seed : int
        The run's seed, >= 0.
    purpose : str
        What is drawn, such as ``"fast-samples"``; each purpose has a stream of its own.
    *counters : int
        Epoch, round or worker index, each >= 0.

    Returns
    -------
    numpy.random.Generator
        A fresh generator; equal arguments give an equal sequence.
    """
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, counters)))


def derived_seed(seed: int, purpose: str, *counters: int) -> int:
    """Return a seed in [0, 2**63) for a library that wants a number, such as torch."""
    state = _sequence(seed, purpose, counters).generate_state(1, np.uint64)
    return int(state[0]) & (2**63 - 1)


def _sequence(seed: int, purpose: str, counters: tuple[int, ...]) -> np.random.SeedSequence:
    # As a spawn key, not as entropy: entropy is padded with zeros, so that (0,) and (0, 0) and
    # () would be the same draw.
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *counters))


class LossTable:
    """The last recorded training loss of each of N samples, and the round that produced it.

    The losses are those of the training forward pass (train mode, before the step), so they
    cost nothing; a sample that is not drawn keeps its old one.

    Parameters
    ----------
    num_samples : int
        N, >= 1.

    Attributes
    ----------
    losses : numpy.ndarray
        float32 of shape (N,); infinity for a sample that was never seen.
    rounds : numpy.ndarray
        int32 of shape (N,); the round of the record, 0 for a sample that was never seen.
    failures : numpy.ndarray
        uint8 of shape (N,); how many orders of a sample failed while it was never seen, 2 at most.
    """

    def __init__(self, num_samples: int) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples = {num_samples} must be at least 1")
        self.losses: FloatArray = np.full(num_samples, UNSEEN, np.float32)
        self.rounds: IntArray = np.zeros(num_samples, np.int32)
        self.failures: npt.NDArray[np.uint8] = np.zeros(num_samples, np.uint8)

    def __len__(self) -> int:
        return len(self.losses)

    def record(self, indices: IntArray, losses: FloatArray, server_round: int) -> None:
        """Record one worker's losses of one round.

        Call it in descending worker order: where two workers had the same sample, the lowest
        worker index is written last and wins. Where one worker had it twice, its later loss
        wins. Losses that are not finite are left out.
        """
        finite = np.isfinite(losses)
        indices, losses = indices[finite], losses[finite]
        self.losses[indices] = losses
        self.rounds[indices] = server_round

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Return a copy of the three arrays by name."""
        return {name: getattr(self, name).copy() for name in ("losses", "rounds", "failures")}

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore the arrays; ValueError if one has another shape or dtype."""
        for name, own in self.state_dict().items():
            if (state[name].shape, state[name].dtype) != (own.shape, own.dtype):
                raise ValueError(f"its loss table is not one of {len(self)} samples")
            setattr(self, name, state[name].copy())

    def record_failure(self, indices: IntArray) -> None:
        """Count an order that failed for those of its samples that were never seen."""
        unseen = indices[self.rounds[indices] == 0]
        self.failures[unseen] = np.minimum(self.failures[unseen] + 1, _MOST_FAILURES)

    def ranking_losses(self) -> FloatArray:
        """Return the losses that samples are ranked by, which are not to be changed.

        They are the recorded ones, and infinity for a sample that was never seen. But one whose
        orders failed twice may be why they fail: it has the median of the recorded losses, lest
        the same workers get it first in every epoch.
        """
        failed = (self.failures == _MOST_FAILURES) & (self.rounds == 0)
        recorded = self.losses[self.rounds > 0] if failed.any() else ()
        if not len(recorded):
            return self.losses
        return np.where(failed, np.float32(np.median(recorded)), self.losses)

    def subset(self, indices: IntArray) -> "LossTable":
        """Return a table of these samples alone, a copy."""
        part = LossTable(len(indices))
        part.losses, part.rounds = self.losses[indices], self.rounds[indices]
        part.failures = self.failures[indices]
        return part

    def mean_age_rounds(self, server_round: int) -> float:
        """Return the mean age, in rounds, of the losses that are recorded; nan without any."""
        num_seen = int(np.count_nonzero(self.rounds))
        if not num_seen:
            return float("nan")
        return server_round - int(self.rounds.sum(dtype=np.int64)) / num_seen


def highest_losses(
    losses: FloatArray, count: int, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Mark the `count` highest losses; ties are broken at random.

    Parameters
    ----------
    losses : numpy.ndarray
        float32 of shape (N,), no nan; infinity ranks highest.
    count : int
        How many to mark, in [0, N].
    rng : numpy.random.Generator
        Breaks the ties.

    Returns
    -------
    numpy.ndarray
        bool of shape (N,) with exactly `count` True.
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
    """Draw `count` samples, a share of them those with the highest loss.

    Where `count` exceeds N, the result is all N samples shuffled, followed by a list of the
    excess that the same rule chose: no index comes twice within one such list.

    Parameters
    ----------
    losses : numpy.ndarray
        float32 of shape (N,); infinity for a sample that was never seen.
    count : int
        How many to draw, >= 0.
    high_loss_ratio : float
        Share, in [0, 1], chosen by loss; the rest is uniform among the others.
    rng : numpy.random.Generator
        Source of the draw.

    Returns
    -------
    numpy.ndarray
        int32 of shape (count,), each list of it shuffled.
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


def permutation_stream(seed: int, num_samples: int, start: int, count: int) -> IntArray:
    """Return elements [start, start + count) of the endless stream of permutations of N samples."""
    parts = [np.empty(0, np.int32)]
    while count > 0:
        number, offset = divmod(start, num_samples)
        permutation = generator(seed, "permutation", number).permutation(num_samples)
        parts.append(permutation[offset : offset + count].astype(np.int32))
        start, count = start + len(parts[-1]), count - len(parts[-1])
    return np.concatenate(parts)


@dataclass(frozen=True)
class SampleList:
    """Sample indices of a whole epoch, and the workers that share them.

    Parameters
    ----------
    indices : numpy.ndarray
        int32; in the order in which they are dealt.
    members : tuple of int
        Indices of these workers among the participants, ascending.
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
        Communication rounds of this epoch, or of the sampler's own horizon.
    participants : tuple of Participant
        All workers that take part, in worker order.
    samples_per_round : tuple of int
        tau_i b_i of each of them.
    samples_before : int
        Samples that were planned in all earlier epochs, and in this one before the first of the
        rounds. Under a selection those of as many epochs with all that it chose for this one, so
        that each begins a permutation of its own.
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
        """Return how many samples these workers take in this epoch."""
        return self.rounds * sum(self.samples_per_round[i] for i in members)


class Sampler(Protocol):
    """Chooses the samples of one epoch. Subclass it and write `sample_lists`."""

    needs_both_tiers: bool = False
    """Whether a run must start with at least one fast and one slow worker."""

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return the epoch's lists; every participant is a member of exactly one."""
        ...

    def horizon(self, num_samples: int, samples_per_round: int) -> int | None:
        """Return how many rounds its lists are for, >= 1; None for those of the epoch.

        Then they are made anew, in the epoch or in a later one; also by an epoch that begins with
        other workers or steps.
        """
        return None


@dataclass(frozen=True)
class UniformSampler(Sampler):
    """All workers read one endless stream of seeded permutations (the unbiased algorithms).

    An epoch may end inside a permutation; the next one goes on from there.
    """

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return one list, shared by all workers."""
        members = tuple(range(len(request.participants)))
        count = request.set_size(members)
        indices = permutation_stream(request.seed, len(table), request.samples_before, count)
        return [SampleList(indices, members)]


@dataclass(frozen=True)
class SeparatedSampler(Sampler):
    """One tier gets the hardest samples and a random rest, the other a uniform draw.

    The paper's method, with the fast tier. The two draws are independent, so they may overlap.

    Parameters
    ----------
    high_loss_ratio : float (default: HIGH_LOSS_RATIO)
        lambda: share of that tier's samples that are those with the highest recorded loss, in
        [0, 1]; the rest of them is drawn uniformly.
    high_loss_to : {"fast", "slow"} (default: "fast")
        Which tier that is.
    """

    needs_both_tiers = True
    disjoint: ClassVar[bool] = False
    """Whether the other tier gets what is left of all samples, as far as that suffices."""

    high_loss_ratio: float = HIGH_LOSS_RATIO
    high_loss_to: TierName = "fast"

    def __post_init__(self) -> None:
        if not 0.0 <= self.high_loss_ratio <= 1.0:  # also refuses nan
            raise ValueError(f"high_loss_ratio = {self.high_loss_ratio} must lie in [0, 1]")
        if self.high_loss_to not in _DRAWS:
            raise ValueError(
                f"high_loss_to = {self.high_loss_to!r} must be one of {', '.join(_DRAWS)}"
            )

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return the fast workers' list and the slow workers' list."""
        sample_lists = {}
        losses = table.ranking_losses()
        taken = np.zeros(len(table), np.bool_)
        by_loss_first = sorted(_DRAWS.items(), key=lambda draw: draw[0] != self.high_loss_to)
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
        return [sample_lists[tier] for tier in _DRAWS if tier in sample_lists]


@dataclass(frozen=True)
class UnifiedSampler(SeparatedSampler):
    """One tier chooses first, the hardest samples and a random rest; the other gets what is left.

    So no sample is trained on by both, as far as N suffices: where what is left is too short,
    the rest is drawn uniformly from all samples. The parameters are those of `SeparatedSampler`.
    """

    disjoint: ClassVar[bool] = True


# --- what the authors' released code does, which is not what their paper says ------------------


@dataclass(frozen=True)
class ReshuffledSampler(UniformSampler):
    """All workers share a permutation, and a new one as soon as no whole round is left of it.

    The baseline of the released code. That is after floor(N / S) rounds of S samples, while an
    epoch of the paper's table has floor(N / (B P tau_fast)).
    """

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return one list, shared by all workers."""
        first = request.samples_before * len(table)  # so each begins a permutation of its own
        return super().sample_lists(replace(request, samples_before=first), table)

    def horizon(self, num_samples: int, samples_per_round: int) -> int:
        """Return how many whole rounds there are in N samples."""
        return max(1, num_samples // samples_per_round)


@dataclass(frozen=True)
class CandidateSampler(ReshuffledSampler):
    """One tier gets the highest losses of a uniform list of candidates, the other a uniform draw.

    The method of the released code, with the slow tier; its horizon is that of its baseline.

    Parameters
    ----------
    candidate_factor : int (default: 4)
        Candidates per sample that is taken of them, >= 1; all N where there are fewer.
    high_loss_to : {"fast", "slow"} (default: "slow")
        Which tier that is.
    """

    needs_both_tiers = True

    candidate_factor: int = 4
    high_loss_to: TierName = "slow"

    def __post_init__(self) -> None:
        if self.candidate_factor < 1 or self.high_loss_to not in _DRAWS:
            raise ValueError(f"{self}: candidate_factor must be >= 1, high_loss_to fast or slow")

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return the fast workers' list and the slow workers' list."""
        sample_lists = []
        losses = table.ranking_losses()
        for tier, purpose in _DRAWS.items():
            if members := request.tier(tier == "fast"):
                rng = generator(request.seed, purpose, request.samples_before)
                count = request.set_size(members)
                factor = self.candidate_factor if tier == self.high_loss_to else 1
                drawn = draw_samples(losses, max(count, min(factor * count, len(table))), 0.0, rng)
                if tier == self.high_loss_to:  # the candidates are in random order, so ties are
                    drawn = drawn[np.argsort(losses[drawn], kind="stable")[-count:]]
                    rng.shuffle(drawn)
                sample_lists.append(SampleList(drawn, members))
        return sample_lists
