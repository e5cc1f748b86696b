"""Who does how many local steps in one communication round (tau in the paper)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

FAST_SPEED_RATIO = 0.7
"""A worker that nobody named is fast when its speed ratio is above this."""

_ONE_STEP_FITS = 0.75

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
        B, the common number of samples per local step, >= 1.
    speed_ratio : float, optional
        gamma: seconds per step on the fastest worker over seconds per step here, in (0, 1];
        both for steps of the common batch size.
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

    It may have more, and each part is optional: an attribute ``needs_speeds`` that is true, and
    it is given the speed ratios of slow workers, with ``of_fast_ones_too`` of all;
    ``follows_speeds`` that is true, and these are brought up to
    date after every epoch; a method ``batch_sizes(participants)`` that decides b_i as well, and
    ``check(participants)`` that raises ``ValueError`` before the first epoch.
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


def shrunk_batch(speed_ratio: float, local_steps_fast: int, batch_size: int) -> int:
    """Return b_i of a worker that is too slow for even one whole step in a round.

    ``min(B, max(2, floor(gamma tau_fast B + 1/2)))`` where gamma tau_fast < 3/4, else B.

    >>> [shrunk_batch(gamma, 32, 64) for gamma in (1 / 40, 1 / 64, 1 / 100, 1e-6)]
    [64, 32, 20, 2]
    """
    steps = speed_ratio * local_steps_fast
    if steps >= _ONE_STEP_FITS:
        return batch_size
    return min(batch_size, max(2, math.floor(steps * batch_size + 0.5)))


def batch_sizes_of(policy: StepPolicy, participants: Sequence[Participant]) -> list[int]:
    """Return b_i of every worker: as the policy decides, or else the common one."""
    decide = getattr(policy, "batch_sizes", None)
    return [p.batch_size for p in participants] if decide is None else list(decide(participants))


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
    shrink_slow_batch : bool (default: True)
        A worker that is too slow for one step in a round gets a smaller batch; only where its
        steps come from its speed.
    """

    local_steps_fast: int = 32
    local_steps_slow: int | None = None
    shrink_slow_batch: bool = True

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

    def batch_sizes(self, participants: Sequence[Participant]) -> list[int]:
        """Return b_i of each participant: the common one, or a shrunk one."""
        return [
            _batch_by_speed(participant, self.local_steps_fast)
            if self.shrink_slow_batch and not participant.fast and self.local_steps_slow is None
            else participant.batch_size
            for participant in participants
        ]

    def _steps_of(self, participant: Participant) -> int:
        if participant.given_steps is not None:
            return participant.given_steps
        if participant.fast:
            return self.local_steps_fast
        if self.local_steps_slow is not None:
            return self.local_steps_slow
        return _steps_by_speed(participant, self.local_steps_fast, "local-steps-slow = 'auto'")


@dataclass(frozen=True)
class BySpeedSteps:
    """The steps of every worker, fast or slow, come from its speed: for more than two speeds.

    A worker's own ``given_steps`` hold first. The fastest worker does `local_steps_fast`.

    Parameters
    ----------
    local_steps_fast : int
        tau_fast.
    shrink_slow_batch : bool (default: True)
        As for `SystemAwareSteps`.
    """

    local_steps_fast: int = 32
    shrink_slow_batch: bool = True
    needs_speeds: bool = True
    of_fast_ones_too: bool = True

    def __post_init__(self) -> None:
        _at_least_one("local_steps_fast", self.local_steps_fast)

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return the steps of each participant.

        Raises
        ------
        ValueError
            If a worker has neither steps nor a known speed.
        """
        return [
            p.given_steps or _steps_by_speed(p, self.local_steps_fast, 'steps = "by-speed"')
            for p in participants
        ]

    def batch_sizes(self, participants: Sequence[Participant]) -> list[int]:
        """Return b_i of each participant: the common one, or a shrunk one."""
        return [
            _batch_by_speed(participant, self.local_steps_fast)
            if self.shrink_slow_batch
            else participant.batch_size
            for participant in participants
        ]


def _steps_by_speed(participant: Participant, local_steps_fast: int, wanted_by: str) -> int:
    if participant.speed_ratio is not None:
        return proportional_steps(participant.speed_ratio, local_steps_fast)
    raise ValueError(
        f"{wanted_by} needs the speed of every worker, and none is known; "
        "give a number, such as local-steps-slow = 8, or steps= in the worker specification"
    )


def _batch_by_speed(participant: Participant, local_steps_fast: int) -> int:
    if participant.given_steps is not None or participant.speed_ratio is None:
        return participant.batch_size
    return shrunk_batch(participant.speed_ratio, local_steps_fast, participant.batch_size)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} = {value} must be at least 1")
