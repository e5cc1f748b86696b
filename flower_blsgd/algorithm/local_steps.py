"""Who does how many local steps in one communication round (tau in the paper)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

FAST_SPEED_RATIO = 0.7
"""A worker that nobody named is fast when its speed ratio is above this."""

Clock = Literal["wall", "device"]
"""Which speeds count: those with all workers computing at once, or each worker's alone."""


@dataclass(frozen=True)
class Participant:
    """What the mathematics needs to know of one worker.

    Parameters
    ----------
    fast : bool
        Whether it belongs to the fast tier.
    batch_size : int
        Samples per local step, >= 1.
    speed_ratio : float, optional
        gamma: seconds per step on the fastest worker over seconds per step here, in (0, 1].
        None when no speed is known.
    given_steps : int, optional
        ``steps=`` of its group in the worker specification.
    """

    fast: bool
    batch_size: int
    speed_ratio: float | None = None
    given_steps: int | None = None


class StepPolicy(Protocol):
    """Decides the local steps of every worker from what is known of all of them.

    One that has an attribute ``needs_speeds`` that is true is given every speed ratio.
    """

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return the steps of each participant, in order, each >= 1."""
        ...


def speed_ratios(seconds_per_step: Sequence[float | None]) -> list[float | None]:
    """Return gamma of every worker; None where the seconds per step are not known."""
    known = [seconds for seconds in seconds_per_step if seconds is not None]
    if not known:
        return [None] * len(seconds_per_step)
    fastest = min(known)
    return [None if seconds is None else fastest / seconds for seconds in seconds_per_step]


def proportional_steps(speed_ratio: float, local_steps_fast: int) -> int:
    """Return ``max(1, floor(gamma tau_fast + 1/2))``.

    >>> [proportional_steps(gamma, 32) for gamma in (1.0, 0.5, 0.25, 0.01)]
    [32, 16, 8, 1]
    """
    return max(1, math.floor(speed_ratio * local_steps_fast + 0.5))


def shrunk_steps(local_steps: Sequence[int], longest: int, largest: int | None = None) -> list[int]:
    """Scale all step counts by longest / largest, rounded down, each at least 1.

    `largest` is the largest of them unless it is given.
    """
    largest = largest or max(local_steps)
    return [max(1, steps * longest // largest) for steps in local_steps]


@dataclass(frozen=True)
class SameSteps:
    """Every worker does the same number of steps: balanced local SGD; with 1, synchronous SGD."""

    steps: int

    def __post_init__(self) -> None:
        _at_least_one("steps", self.steps)

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return the same number for all."""
        return [self.steps] * len(participants)


@dataclass(frozen=True)
class FixedSteps:
    """The caller names the steps of every worker, in the order of the worker index."""

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        for steps in self.steps:
            _at_least_one("steps", steps)

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return the named numbers.

        Raises
        ------
        ValueError
            If there are more or fewer workers than numbers.
        """
        if len(participants) != len(self.steps):
            raise ValueError(
                f"steps names {len(self.steps)} workers, but {len(participants)} take part; "
                "give one number for each"
            )
        return list(self.steps)


@dataclass(frozen=True)
class SystemAwareSteps:
    """Each worker does as many steps as its speed allows (the paper's method).

    First that holds: the worker's own ``given_steps``; for a fast one `local_steps_fast`; for a
    slow one `local_steps_slow`; its speed ratio times `local_steps_fast`.

    Parameters
    ----------
    local_steps_fast : int
        tau_fast: steps per round of every fast worker.
    local_steps_slow : int, optional
        Steps per round of every slow worker; None derives them from the speed ratios.
    """

    local_steps_fast: int = 32
    local_steps_slow: int | None = None

    def __post_init__(self) -> None:
        _at_least_one("local_steps_fast", self.local_steps_fast)
        if self.local_steps_slow is not None:
            _at_least_one("local_steps_slow", self.local_steps_slow)

    @property
    def needs_speeds(self) -> bool:
        """Whether the steps of slow workers come from their speed ratios."""
        return self.local_steps_slow is None

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return the steps of each participant.

        Raises
        ------
        ValueError
            If a slow worker has neither steps nor a known speed.
        """
        return [self._steps_of(participant) for participant in participants]

    def _steps_of(self, participant: Participant) -> int:
        if participant.given_steps is not None:
            return participant.given_steps
        if participant.fast:
            return self.local_steps_fast
        if self.local_steps_slow is not None:
            return self.local_steps_slow
        if participant.speed_ratio is not None:
            return proportional_steps(participant.speed_ratio, self.local_steps_fast)
        raise ValueError(
            "local-steps-slow = 'auto' needs the speed of every worker, and none is known; "
            "give a number, such as local-steps-slow = 8, or steps= in the worker specification"
        )


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} = {value} must be at least 1")
