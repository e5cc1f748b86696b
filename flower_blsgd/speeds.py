"""When and how the workers' seconds per step are measured, and what is assumed before."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flwr.serverapp import Grid

from .algorithm.local_steps import Clock
from .profile_query import UNKNOWN_DEVICE, Address, ask_worker_speeds
from .protocol import WorkerProfile

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeedRule:
    """Decides whether to measure, and how.

    Parameters
    ----------
    batch_size : int
        Samples per step.
    steps_from_speeds : bool (default: False)
        Whether the step policy asks for the speed of slow workers.
    clock : {"wall", "device"} (default: "wall")
        ``"wall"`` measures all at once, as they train; ``"device"`` one after another, each as
        if it had the machine for itself, and always.
    fast_too : bool (default: False)
        Whether the policy asks for the speed of fast workers as well.
    """

    batch_size: int
    steps_from_speeds: bool = False
    clock: Clock = "wall"
    fast_too: bool = False

    def decides(self, profile: WorkerProfile) -> bool:
        """Return whether a worker's tier or its steps come from its speed."""
        if profile.device == UNKNOWN_DEVICE:
            return False
        return not profile.tier or self.decides_steps(profile)

    def decides_steps(self, profile: WorkerProfile) -> bool:
        """Return whether the steps of a worker whose tier is named come from its speed."""
        asked = profile.tier == "slow" or self.fast_too
        return self.steps_from_speeds and asked and not profile.steps

    def applies(self, profiles: Sequence[WorkerProfile]) -> bool:
        """Return whether speeds are needed with these workers."""
        return self.clock == "device" or any(self.decides(profile) for profile in profiles)

    def measure(
        self, grid: Grid, workers: Sequence[Address], others: Sequence[Address]
    ) -> dict[Address, float | str]:
        """Return the seconds per step by worker, or why they are not known.

        Parameters
        ----------
        grid : Grid
            Any Flower grid.
        workers : sequence of (int, int or None)
            Whom to ask.
        others : sequence of (int, int or None)
            Measured before: on the wall clock they compute meanwhile, as they do in a round.
        """
        if self.clock == "wall":
            _LOG.info("measuring the seconds per step of %d workers at once", len(workers))
            found = ask_worker_speeds(grid, [*workers, *others], self.batch_size)
            return {worker: found[worker] for worker in workers}
        _LOG.info("measuring the seconds per step of %d workers one by one", len(workers))
        alone: dict[Address, float | str] = {}
        for worker in workers:
            alone |= ask_worker_speeds(grid, [worker], self.batch_size)
        return alone


def before_measuring(profiles: Sequence[WorkerProfile]) -> list[WorkerProfile]:
    """Fill in tiers and speeds that are still to be measured, so that least is refused.

    Unnamed workers may turn out to be of either tier, but the fastest of all is fast.
    """
    named = {profile.tier for profile in profiles}
    missing = [tier for tier in ("fast", "slow") if tier not in named]
    known = [profile.seconds_per_step for profile in profiles if profile.seconds_per_step > 0]
    assumed = min(known, default=1.0)
    filled = []
    for profile in profiles:
        tier = profile.tier or (missing.pop(0) if missing else "fast")
        filled.append(
            replace(profile, tier=tier, seconds_per_step=profile.seconds_per_step or assumed)
        )
    return filled
