"""Biased local SGD as in the authors' released code, which differs from their paper's text.

Its sample lists last as many full rounds as N samples suffice for. They may continue in the next
epoch, or be replaced within one. Nothing but `parts` imports this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .algorithm.catalog import Settings
from .algorithm.epoch_plan import EpochPlan, RoundShape, rounds_of_epoch
from .algorithm.loss_table import LossTable
from .algorithm.randomness import generator
from .algorithm.sampling import (
    DRAWS,
    EpochRequest,
    SampleList,
    Sampler,
    TierName,
    UniformSampler,
    draw_samples,
)
from .algorithm.selection import Selected
from .errors import UsageError
from .strategy.biased_local_sgd import BiasedLocalSGD
from .strategy.planner import Planner
from .strategy.workers import Worker


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


@dataclass(frozen=True)
class CandidateSampler(ReshuffledSampler):
    """One tier gets the highest losses of a uniform list of candidates, the other a uniform draw.

    The method of the released code, which gives the high losses to the slow tier. There are
    `candidate_factor` candidates per chosen sample, >= 1, but at most N candidates.
    """

    needs_both_tiers = True

    candidate_factor: int = 4
    high_loss_to: TierName = "slow"

    def __post_init__(self) -> None:
        if self.candidate_factor < 1 or self.high_loss_to not in DRAWS:
            raise ValueError(f"{self}: candidate_factor must be >= 1, high_loss_to fast or slow")

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return the fast workers' list and the slow workers' list."""
        sample_lists = []
        losses = table.ranking_losses()
        for tier, purpose in DRAWS.items():
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


def released_sampler(settings: Settings) -> Sampler:
    """Return the sampler of the settings, one of `RELEASED_SAMPLERS`."""
    if settings.choices.sampler == "reshuffled":
        return ReshuffledSampler()
    return CandidateSampler(settings.candidate_factor, settings.choices.high_loss_to)


class ReleasedPlanner(Planner):
    """Planner whose sample lists do not end with the epoch.

    The `first_round` of a plan is negative if its lists began in an earlier epoch.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        selection, sampler = self.settings.selection, self.settings.sampler
        if selection:
            raise UsageError(
                f"selection ({type(selection).__name__}) leaves out samples of an epoch, but "
                f"{type(sampler).__name__} does not choose samples by epoch; use "
                '"separated" or "uniform"'
            )

    def plan_lists(
        self,
        epoch: int,
        shape: RoundShape,
        training: Sequence[Worker],
        rounds_before: int,
        selected: Selected | None,
    ) -> EpochPlan:
        """Continue the lists if the epoch has the same workers and steps; else make new ones."""
        if self.epoch_ended and training == self.workers:
            last = self.plan
            if last.shape == shape and last.lists_end > last.rounds:
                rounds = rounds_of_epoch(
                    shape, self.progress.samples_due - self.progress.samples_planned
                )
                first_round = last.first_round - last.rounds
                return replace(last, epoch=epoch, rounds=rounds, first_round=first_round)
        full_rounds = max(1, self.settings.num_samples // sum(shape.samples_per_round))
        return self.new_lists(
            self.settings.seed, epoch, shape, training, rounds_before, listed_rounds=full_rounds
        )


class ReleasedLocalSGD(BiasedLocalSGD):
    """Strategy of the samplers in this module; the parameters are those of `BiasedLocalSGD`."""

    planner_type = ReleasedPlanner
