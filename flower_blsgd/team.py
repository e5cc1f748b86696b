"""Whether a team has the fast and slow workers that its settings need."""

import logging
from collections.abc import Sequence

from .algorithm.local_steps import Participant
from .algorithm.sampling import Sampler
from .algorithm.train_on import TrainOn
from .errors import UsageError
from .roster import Worker

_LOG = logging.getLogger(__name__)

TIERS = ((True, "fast"), (False, "slow"))


class TierWatch:
    """Warns, once, when the last worker of a tier is gone."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def tell_lost(self, active: Sequence[Worker]) -> None:
        """Look at the workers that are there now."""
        for fast, tier in TIERS:
            there = any(worker.fast is fast for worker in active)
            if tier in self._seen and not there:
                self._seen.discard(tier)
                _LOG.warning("the last %s worker is gone; the run goes on without", tier)
            elif there:
                self._seen.add(tier)


def refuse_missing_tier(workers: Sequence[Worker], sampler: Sampler, train_on: TrainOn) -> None:
    """Raise UsageError if a tier is missing that the sampler, or who trains, needs."""
    for fast, tier in TIERS:
        needed_by = _needed_by(fast, sampler, train_on)
        if needed_by and not any(worker.fast is fast for worker in workers):
            there = ", ".join(worker.label for worker in workers)
            raise UsageError(f"workers: no {tier} worker among {there}, and {needed_by}")


def _needed_by(fast: bool, sampler: Sampler, train_on: TrainOn) -> str:
    """Return what needs a worker of a tier, and the way out; empty if nothing does."""
    slow_trains = train_on.trains(Participant(fast=False, batch_size=1))
    if fast and not slow_trains:
        return "only fast ones are to train; name one fast"
    if not fast and train_on.slow_sums:
        return 'slow ones are to add up the models; name one slow, or use train-on = "fast"'
    if sampler.needs_both_tiers and slow_trains:
        return (
            "this sampler needs a fast and a slow one; "
            f'name one {"fast" if fast else "slow"}, or use sampler = "uniform"'
        )
    return ""
