"""A complete custom sampler."""

from dataclasses import dataclass

import numpy as np

from flower_blsgd import EpochRequest, LossTable, SampleList, Sampler, generator


@dataclass(frozen=True)
class LossProportionalSampler(Sampler):
    """Fast workers draw samples in proportion to their loss; slow ones uniformly.

    Parameters
    ----------
    floor : float (default: 0.1)
        Added to every loss, > 0, so that learned samples are also drawn.
    """

    floor: float = 0.1
    needs_both_tiers: bool = True

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        """Return one sample list for the fast workers and one for the slow ones."""
        seen = np.isfinite(table.losses)  # the loss is infinite for samples without a record
        highest = table.losses[seen].max(initial=0.0)
        chances = np.where(seen, table.losses, highest).astype(np.float64) + self.floor
        sample_lists = []
        for fast, weights in ((True, chances / chances.sum()), (False, None)):
            if members := request.tier(fast):
                rng = generator(request.seed, f"loss-proportional-{fast}", request.epoch)
                indices = rng.choice(len(table), request.set_size(members), p=weights)
                sample_lists.append(SampleList(indices.astype(np.int32), members))
        return sample_lists
