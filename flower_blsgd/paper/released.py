"""Samplers of the authors' released code, which differs from what their paper describes."""

from dataclasses import dataclass, replace

import numpy as np

from ..algorithm.loss_table import LossTable
from ..algorithm.randomness import generator
from ..algorithm.sampling import (
    EpochRequest,
    SampleList,
    TierName,
    UniformSampler,
    draw_samples,
)

_PURPOSES = {"fast": "fast-samples", "slow": "slow-samples"}
"""Purpose of each tier's random draw."""


@dataclass(frozen=True)
class ReshuffledSampler(UniformSampler):
    """All workers share a permutation, which is replaced when no full round is left of it.

    The baseline of the released code. A permutation lasts floor(N / S) rounds of S samples, while
    an epoch of the paper's table has floor(N / (B P tau_fast)) rounds.
    """

    is_stream = False

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return one list, shared by all workers."""
        # A multiple of N: each list begins a new permutation.
        first = request.samples_before * len(table)
        return super().sample_lists(replace(request, samples_before=first), table)

    def horizon(self, num_samples: int, samples_per_round: int) -> int:
        """Return how many full rounds N samples suffice for."""
        return max(1, num_samples // samples_per_round)


@dataclass(frozen=True)
class CandidateSampler(ReshuffledSampler):
    """One tier gets the highest losses of a uniform list of candidates, the other a uniform draw.

    The method of the released code, which gives the high losses to the slow tier. Its horizon is
    that of the baseline. There are `candidate_factor` candidates per chosen sample, >= 1, but at
    most N candidates.
    """

    needs_both_tiers = True

    candidate_factor: int = 4
    high_loss_to: TierName = "slow"

    def __post_init__(self) -> None:
        if self.candidate_factor < 1 or self.high_loss_to not in _PURPOSES:
            raise ValueError(f"{self}: candidate_factor must be >= 1, high_loss_to fast or slow")

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return the fast workers' list and the slow workers' list."""
        sample_lists = []
        losses = table.ranking_losses()
        for tier, purpose in _PURPOSES.items():
            if members := request.tier(tier == "fast"):
                rng = generator(request.seed, purpose, request.samples_before)
                count = request.set_size(members)
                factor = self.candidate_factor if tier == self.high_loss_to else 1
                drawn = draw_samples(losses, max(count, min(factor * count, len(table))), 0.0, rng)
                if tier == self.high_loss_to:  # candidates are in random order, so ties are too
                    drawn = drawn[np.argsort(losses[drawn], kind="stable")[-count:]]
                    rng.shuffle(drawn)
                sample_lists.append(SampleList(drawn, members))
        return sample_lists
