"""Learning rate of each round: warm-up, then a decreasing schedule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Schedule = Literal["steps", "cosine", "linear"]


@dataclass(frozen=True)
class LearningRate:
    """Step, cosine or linear schedule over the epochs or the budget, with a linear warm-up.

    It does not depend on local steps. The budget is a number of epochs, rounds or seconds; its
    used share is updated every round.

    Parameters
    ----------
    base : float
        Learning rate before any decay, > 0.
    decay_epochs : sequence of float (default: ())
        Numbers of epochs after which the rate is multiplied by `factor`.
    decay_shares : sequence of float (default: ())
        Shares of the budget, in (0, 1), after which the rate is multiplied by `factor`.
    factor : float (default: 0.1)
        Multiplier of each decay.
    warmup_epochs : float (default: 0)
        Epochs in which the rate grows linearly, round by round.
    schedule : {"steps", "cosine", "linear"} (default: "steps")
        ``"steps"`` uses the decays. The others ignore them, and decrease from `base` at the end of
        the warm-up to 0 at the end of the budget.
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

    def at(
        self, epoch: int, budget_share: float, rounds_done: int = 0, rounds_in_epoch: int = 1
    ) -> float:
        """Return the learning rate of one round.

        Parameters
        ----------
        epoch : int
            Counted from 1.
        budget_share : float
            Used share of the budget at the start of this round, in [0, 1].
        rounds_done, rounds_in_epoch : int (default: 0, 1)
            Completed rounds of this epoch, and all its rounds.
        """
        if self.schedule == "steps":
            # The tolerance absorbs rounding: 60 % of 5 epochs is 3 epochs.
            decays = sum(epoch - 1 >= after for after in self.decay_epochs)
            decays += sum(budget_share >= share - 1e-9 for share in self.decay_shares)
            rate = self.base * self.factor**decays
        else:
            left = 1.0 - min(1.0, budget_share)
            if self.warmup_epochs and left:
                # The epochs so far give the share of the budget that the warm-up took.
                done = max(epoch - 1 + rounds_done / rounds_in_epoch, self.warmup_epochs)
                left *= done / (done - budget_share * self.warmup_epochs)
            cosine = self.schedule == "cosine"
            rate = self.base * ((1.0 - math.cos(math.pi * left)) / 2 if cosine else left)
        if self.warmup_epochs > 0:
            epoch_share = (rounds_done + 1) / rounds_in_epoch
            rate *= min(1.0, (epoch - 1 + epoch_share) / self.warmup_epochs)
        return rate


def parse_decay(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read ``"60%, 80%"`` or ``"60, 80"``; return the plain epochs and the shares of the budget.

    ValueError if an entry is not a positive number, or a share is not below 100 %.
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
