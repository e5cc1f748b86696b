"""The learning rate that the server sends in every order: warm-up, then a schedule downwards.

Also what goes with it: local steps that follow it, and its scale for a larger effective batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Schedule = Literal["steps", "cosine", "linear"]
StepSchedule = Literal["constant", "post-local", "qsr"]
RateScaling = Literal["none", "linear", "sqrt"]

_POST_LOCAL_BELOW = 0.5
_QSR_MOST = 16.0


@dataclass(frozen=True)
class LearningRate:
    """Steps, a cosine or a line over the epochs or the budget, with a linear warm-up.

    It is never counted in local steps, so a worker's steps do not change it. A share of the budget
    is one of epochs, rounds or seconds, whichever it is in, and counts from round to round.

    Parameters
    ----------
    base : float
        Learning rate before any decay, > 0.
    decay_epochs : sequence of float (default: ())
        After this many epochs the rate is multiplied by `factor`; plain numbers never scale.
    decay_shares : sequence of float (default: ())
        The same from the first round past these shares of the budget, in (0, 1).
    factor : float (default: 0.1)
        Multiplier of each decay.
    warmup_epochs : float (default: 0)
        Over these the rate grows linearly, round by round.
    schedule : {"steps", "cosine", "linear"} (default: "steps")
        ``"steps"`` decays as above. The others fall from `base`, where the warm-up ends, to 0 at
        the end of the budget; decays have no effect on them.
    """

    base: float
    decay_epochs: Sequence[float] = ()
    decay_shares: Sequence[float] = ()
    factor: float = 0.1
    warmup_epochs: float = 0.0
    schedule: Schedule = "steps"

    def __post_init__(self) -> None:
        if not (self.base > 0 and math.isfinite(self.base)):
            raise ValueError(f"learning rate = {self.base} must be a number above 0")
        if self.schedule not in get_args(Schedule):
            known = ", ".join(get_args(Schedule))
            raise ValueError(f"schedule = {self.schedule!r} must be one of {known}")

    def decays(self, epoch: int, budget_share: float) -> int:
        """Return how many of the decays have passed when a round begins; see `at`."""
        # A hair of tolerance: 60 % of 5 epochs is 3 epochs, whatever the binary fractions say.
        by_epoch = sum(epoch - 1 >= after for after in self.decay_epochs)
        return by_epoch + sum(budget_share >= share - 1e-9 for share in self.decay_shares)

    def at(
        self, epoch: int, budget_share: float, rounds_done: int = 0, rounds_in_epoch: int = 1
    ) -> float:
        """Return the learning rate of one round.

        Parameters
        ----------
        epoch : int
            Counted from 1.
        budget_share : float
            Share of the budget that is used when this round begins, in [0, 1].
        rounds_done, rounds_in_epoch : int (default: 0, 1)
            Rounds of this epoch before this one, and all of them.
        """
        rate = self.base * self.decay_at(epoch, budget_share, rounds_done, rounds_in_epoch)
        if self.warmup_epochs > 0:
            epoch_share = (rounds_done + 1) / rounds_in_epoch
            rate *= min(1.0, (epoch - 1 + epoch_share) / self.warmup_epochs)
        return rate

    def decay_at(
        self, epoch: int, budget_share: float, rounds_done: int = 0, rounds_in_epoch: int = 1
    ) -> float:
        """Return the share of `base` that the schedule leaves, in [0, 1], without the warm-up.

        Parameters are those of `at`.
        """
        if self.schedule == "steps":
            return self.factor ** self.decays(epoch, budget_share)
        left = 1.0 - min(1.0, budget_share)
        if self.warmup_epochs and left:
            # What share of the budget the warm-up took, the epochs so far say.
            done = max(epoch - 1 + rounds_done / rounds_in_epoch, self.warmup_epochs)
            left *= done / (done - budget_share * self.warmup_epochs)
        return (1.0 - math.cos(math.pi * left)) / 2 if self.schedule == "cosine" else left

    @property
    def falls(self) -> bool:
        """Whether it ever falls below `base` after the warm-up."""
        return self.schedule != "steps" or bool(self.decay_epochs or self.decay_shares)


def scheduled_steps(schedule: StepSchedule, local_steps: int, decay: float) -> int:
    """Return tau of an epoch that begins with a learning rate of `decay` times its base.

    ``"post-local"`` (Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD"): one step
    until the rate is half its base or less, as after the first decay; `local_steps` from there on.
    ``"qsr"`` (Gu et al. 2024, "A Quadratic Synchronization Rule"): `local_steps` over the square
    of `decay`, but at most 16 times as many, so that a budget in seconds still ends a run in time.

    >>> [scheduled_steps("post-local", 32, decay) for decay in (1.0, 0.6, 0.1)]
    [1, 1, 32]
    >>> [scheduled_steps("qsr", 8, decay) for decay in (1.0, 0.5, 0.1, 0.0)]
    [8, 32, 128, 128]
    """
    if schedule == "post-local":
        return local_steps if decay <= _POST_LOCAL_BELOW else 1
    if schedule == "qsr":
        return math.floor(local_steps * min(_QSR_MOST, 1 / max(decay, 1e-9) ** 2) + 0.5)
    return local_steps


def rate_scale(scaling: RateScaling, loads: Sequence[float], fast: Sequence[bool]) -> float:
    """Return the factor of the learning rate for the larger effective batch of all workers.

    The sum of all loads over that of the fast workers, or its square root; 1 without a fast one.

    >>> rate_scale("linear", [32, 16], [True, False])
    1.5
    """
    fast_load = sum(load for load, is_fast in zip(loads, fast, strict=True) if is_fast)
    if scaling == "none" or not fast_load:
        return 1.0
    ratio = sum(loads) / fast_load
    return ratio if scaling == "linear" else math.sqrt(ratio)


def parse_decay(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read ``"60%, 80%"`` or ``"60, 80"``.

    Returns
    -------
    tuple
        The plain epochs and the shares of the budget.

    Raises
    ------
    ValueError
        If an entry is no positive number, or a share is not below 100 %.

    Examples
    --------
    >>> parse_decay("60%, 80%")
    ((), (0.6, 0.8))
    >>> parse_decay("30")
    ((30.0,), ())
    """
    epochs: list[float] = []
    shares: list[float] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        try:
            value = float(entry.removesuffix("%"))
        except ValueError:
            raise ValueError(f"{entry!r} is neither a number of epochs nor a percentage") from None
        if not value > 0 or not math.isfinite(value):
            raise ValueError(f"{entry!r} must be above 0")
        if entry.endswith("%"):
            if value >= 100:
                raise ValueError(f"{entry!r} must be below 100%")
            shares.append(value / 100)
        else:
            epochs.append(value)
    return tuple(epochs), tuple(shares)
