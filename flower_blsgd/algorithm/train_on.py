"""Who trains, and what the others do meanwhile."""

from dataclasses import dataclass
from typing import Protocol

from .local_steps import Participant


class TrainOn(Protocol):
    """Chooses the workers that are given orders."""

    @property
    def slow_sums(self) -> bool:
        """Whether the slow workers add up the models of the others."""
        ...

    def trains(self, participant: Participant) -> bool:
        """Return whether this worker trains."""
        ...


@dataclass(frozen=True)
class TrainOnAll:
    """Everybody trains."""

    slow_sums: bool = False

    def trains(self, participant: Participant) -> bool:
        """Return true."""
        return True


@dataclass(frozen=True)
class TrainOnFast:
    """Only fast workers train; a slow one is never sent an order.

    Parameters
    ----------
    slow_sums : bool (default: False)
        Each slow worker adds up its slice of the fast ones' models, as the CPUs of BytePS do
        (Jiang et al. 2020, "A Unified Architecture for Accelerating Distributed DNN Training").
    """

    slow_sums: bool = False

    def trains(self, participant: Participant) -> bool:
        """Return whether it is fast."""
        return participant.fast
