"""A sampler of one's own: all that one has to write."""

from dataclasses import dataclass

import numpy as np

from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.randomness import generator
from flower_blsgd.algorithm.sampling import EpochRequest, SampleList, Sampler


@dataclass(frozen=True)
class LossProportionalSampler(Sampler):
    """Fast workers draw each sample with a chance that grows with its loss; slow ones evenly.

    Parameters
    ----------
    floor : float (default: 0.1)
        Added to every loss, > 0: how often samples are drawn that are learned already.
    """

    floor: float = 0.1
    needs_both_tiers: bool = True

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return one list of samples for the fast workers, and one for the slow ones."""
        seen = np.isfinite(table.losses)  # a sample that was never drawn has an infinite loss
        highest = table.losses[seen].max(initial=0.0)
        chances = np.where(seen, table.losses, highest).astype(np.float64) + self.floor
        sample_lists = []
        for fast, weights in ((True, chances / chances.sum()), (False, None)):
            if members := request.tier(fast):
                rng = generator(request.seed, f"loss-proportional-{fast}", request.epoch)
                indices = rng.choice(len(table), request.set_size(members), p=weights)
                sample_lists.append(SampleList(indices.astype(np.int32), members))
        return sample_lists
