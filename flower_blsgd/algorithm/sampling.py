"""Which samples of an epoch go to which tier.

A sampler fills *pools*. A pool is one list of sample indices for a whole epoch and the workers
that it is dealt to; ``epoch_plan`` cuts it into rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from .local_steps import Participant
from .loss_table import IntArray, LossTable
from .randomness import generator
from .sample_draws import draw_samples, mark, permutation_stream, shuffled_marked

TierName = Literal["fast", "slow"]

_DRAWS = {"fast": "fast-samples", "slow": "slow-samples"}
"""What each tier's draw is called in the seed."""


@dataclass(frozen=True)
class Pool:
    """Sample indices of one epoch, and the workers that share them.

    Parameters
    ----------
    indices : numpy.ndarray
        int32; in the order in which they are dealt.
    members : tuple of int
        Positions of the workers among the participants, ascending.
    """

    indices: IntArray
    members: tuple[int, ...]


@dataclass(frozen=True)
class EpochRequest:
    """What a sampler is asked for.

    Parameters
    ----------
    seed : int
        The run's seed.
    epoch : int
        Counted from 1.
    rounds : int
        Communication rounds of this epoch.
    participants : tuple of Participant
        All workers that take part, in worker order.
    samples_per_round : tuple of int
        tau_i b_i of each of them.
    samples_before : int
        Samples that were planned in all earlier epochs.
    """

    seed: int
    epoch: int
    rounds: int
    participants: tuple[Participant, ...]
    samples_per_round: tuple[int, ...]
    samples_before: int

    def tier(self, fast: bool) -> tuple[int, ...]:
        """Return the positions of the fast workers, or of the slow ones."""
        return tuple(i for i, p in enumerate(self.participants) if p.fast is fast)

    def set_size(self, members: Sequence[int]) -> int:
        """Return how many samples these workers take in this epoch."""
        return self.rounds * sum(self.samples_per_round[i] for i in members)


class Sampler(Protocol):
    """Chooses the samples of one epoch. About 20 lines are enough for one's own."""

    @property
    def needs_both_tiers(self) -> bool:
        """Whether it makes no sense without a fast and a slow worker."""
        ...

    def pools(self, request: EpochRequest, table: LossTable) -> list[Pool]:
        """Return the epoch's pools; together their members are all participants."""
        ...


@dataclass(frozen=True)
class UniformSampler:
    """All workers read one endless stream of seeded permutations (the unbiased algorithms).

    An epoch may end inside a permutation; the next one goes on from there.
    """

    needs_both_tiers: bool = False

    def pools(self, request: EpochRequest, table: LossTable) -> list[Pool]:
        """Return one pool for everybody."""
        members = tuple(range(len(request.participants)))
        count = request.set_size(members)
        indices = permutation_stream(request.seed, len(table), request.samples_before, count)
        return [Pool(indices, members)]


@dataclass(frozen=True)
class SeparatedSampler:
    """Fast workers get the hardest samples and a random rest, slow ones a uniform draw.

    The paper's method. The two draws are independent, so they may overlap.

    Parameters
    ----------
    high_loss_ratio : float (default: 0.5)
        lambda: share of a tier's samples that are those with the highest recorded loss, in
        [0, 1].
    high_loss_to : {"fast", "slow"} (default: "fast")
        Which tier that is; the other draws uniformly.
    """

    high_loss_ratio: float = 0.5
    high_loss_to: TierName = "fast"
    needs_both_tiers: bool = True

    def __post_init__(self) -> None:
        _check_high_loss(self.high_loss_ratio, self.high_loss_to)

    def pools(self, request: EpochRequest, table: LossTable) -> list[Pool]:
        """Return the fast workers' pool and the slow workers' pool."""
        pools = []
        for tier, purpose in _DRAWS.items():
            members = request.tier(tier == "fast")
            if not members:
                continue
            rng = generator(request.seed, purpose, request.epoch)
            ratio = self.high_loss_ratio if tier == self.high_loss_to else 0.0
            count = request.set_size(members)
            pools.append(Pool(draw_samples(table.losses, count, ratio, rng), members))
        return pools


@dataclass(frozen=True)
class UnifiedSampler:
    """One tier chooses first, the hardest samples and a random rest; the other gets what is left.

    So no sample is trained on by both, as far as N suffices: where what is left is too short,
    the rest is drawn uniformly from all samples.

    Parameters
    ----------
    high_loss_ratio : float (default: 0.5)
        lambda of the tier that chooses first, in [0, 1].
    high_loss_to : {"fast", "slow"} (default: "fast")
        The tier that chooses first.
    """

    high_loss_ratio: float = 0.5
    high_loss_to: TierName = "fast"
    needs_both_tiers: bool = True

    def __post_init__(self) -> None:
        _check_high_loss(self.high_loss_ratio, self.high_loss_to)

    def pools(self, request: EpochRequest, table: LossTable) -> list[Pool]:
        """Return the pools, that of the fast workers first."""
        first, second = ("fast", "slow") if self.high_loss_to == "fast" else ("slow", "fast")
        taken = np.zeros(len(table), np.bool_)
        pools = {}
        for tier in (first, second):
            members = request.tier(tier == "fast")
            if not members:
                continue
            rng = generator(request.seed, _DRAWS[tier], request.epoch)
            count = request.set_size(members)
            if tier == first:
                indices = draw_samples(table.losses, count, self.high_loss_ratio, rng)
                mark(taken, indices)
            else:
                left = shuffled_marked(np.logical_not(taken, out=taken), rng)
                more = draw_samples(table.losses, max(0, count - len(left)), 0.0, rng)
                indices = np.concatenate([left[:count], more]) if len(more) else left[:count]
            pools[tier] = Pool(indices, members)
        return [pools[tier] for tier in _DRAWS if tier in pools]


def _check_high_loss(ratio: float, to: str) -> None:
    if not 0.0 <= ratio <= 1.0:  # also refuses nan
        raise ValueError(f"high_loss_ratio = {ratio} must lie in [0, 1]")
    if to not in _DRAWS:
        raise ValueError(f"high_loss_to = {to!r} must be one of {', '.join(_DRAWS)}")
