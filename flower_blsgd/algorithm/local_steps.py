"""Decide how many local steps each worker does in one communication round (tau in the paper).

Also how many samples a step has, where that differs between workers (`SystemAwareSteps` with
very slow workers; `BalancedBatches`, which is ``dlb``), and which changes of speed count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

FAST_SPEED_RATIO = 0.7
"""A worker without a named tier is fast when its speed ratio is above this."""

_ONE_STEP_FITS = 0.75
_SMALLEST_BATCH = 2

Clock = Literal["wall", "device"]
"""Which speeds count: those with all workers computing at once, or each worker's alone."""


@dataclass(frozen=True)
class Participant:
    """One worker, as step policies and samplers see it.

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
    """Decides the local steps of every worker, given all of them.

    Subclass it and write `local_steps`; the rest has defaults.
    """

    follows_speeds: bool = False
    """Whether the policy needs new speed ratios after every epoch."""

    @property
    def needs_speeds(self) -> bool:
        """Whether the policy needs the speed ratios of slow workers, which are then measured."""
        return False

    @property
    def needs_fast_speeds(self) -> bool:
        """Whether the policy needs the speed ratios of fast workers as well."""
        return False

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return the steps of each participant, in order, each >= 1."""
        ...

    def batch_sizes(self, participants: Sequence[Participant]) -> list[int]:
        """Return b_i, the samples per step, of each participant, each >= 2."""
        return [participant.batch_size for participant in participants]


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


@dataclass(frozen=True)
class SameSteps(StepPolicy):
    """Every worker does the same number of steps: balanced local SGD; with 1, synchronous SGD."""

    steps: int

    def __post_init__(self) -> None:
        _at_least_one("steps", self.steps)

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return the same number of steps for all participants."""
        return [self.steps] * len(participants)


@dataclass(frozen=True)
class SystemAwareSteps(StepPolicy):
    """Each worker does as many steps as its speed allows (the paper's method).

    A worker's own ``given_steps`` come first. Otherwise a fast one does `local_steps_fast`, a slow
    one `local_steps_slow` or, if that is None, its speed ratio times `local_steps_fast`.

    Parameters
    ----------
    local_steps_fast : int
        tau_fast: steps per round of every fast worker.
    local_steps_slow : int, optional
        Steps per round of every slow worker; None derives them from the speed ratios.
    shrink_slow_batch : bool (default: True)
        A worker that is too slow for one step in a round gets a smaller batch; only where its
        steps come from its speed.
    all_by_speed : bool (default: False)
        The steps of fast workers, too, come from their speed: for more than two speeds. The
        fastest does `local_steps_fast`, and `local_steps_slow` must be None.
    """

    local_steps_fast: int = 32
    local_steps_slow: int | None = None
    shrink_slow_batch: bool = True
    all_by_speed: bool = False

    def __post_init__(self) -> None:
        _at_least_one("local_steps_fast", self.local_steps_fast)
        if self.local_steps_slow is not None:
            _at_least_one("local_steps_slow", self.local_steps_slow)

    @property
    def needs_speeds(self) -> bool:
        """Whether the steps of slow workers come from their speed ratios."""
        return self.local_steps_slow is None

    @property
    def needs_fast_speeds(self) -> bool:
        """Whether the steps of fast workers come from their speed ratios as well."""
        return self.all_by_speed

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return the steps of each participant.

        Raises
        ------
        ValueError
            If a worker whose steps come from its speed has no known one.
        """
        return [self._steps_of(participant) for participant in participants]

    def batch_sizes(self, participants: Sequence[Participant]) -> list[int]:
        """Return b_i of each participant: the common one, or a shrunk one."""
        return [
            shrunk_batch(p.speed_ratio, self.local_steps_fast, p.batch_size)
            if self.shrink_slow_batch and p.speed_ratio is not None and self._goes_by_speed(p)
            else p.batch_size
            for p in participants
        ]

    def _goes_by_speed(self, participant: Participant) -> bool:
        if participant.given_steps is not None or self.local_steps_slow is not None:
            return False
        return not participant.fast or self.all_by_speed

    def _steps_of(self, participant: Participant) -> int:
        if participant.given_steps is not None:
            return participant.given_steps
        if not self._goes_by_speed(participant):
            slow = None if participant.fast else self.local_steps_slow
            return slow or self.local_steps_fast
        if participant.speed_ratio is None:
            raise ValueError(
                "local-steps-slow = 'auto' and steps = 'by-speed' need the speed of every worker, "
                "and none is known; give a number, such as local-steps-slow = 8, or steps= in the "
                "worker specification"
            )
        return proportional_steps(participant.speed_ratio, self.local_steps_fast)


@dataclass(frozen=True)
class BalancedBatches(StepPolicy):
    """One step each, batch sizes by throughput, their sum constant (the policy of ``dlb``).

    The shares follow the throughput of the last epoch; while no speed is known they are equal.
    A worker whose share would be under 2 samples gets 2.
    """

    follows_speeds = True

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return 1 for every worker."""
        return [1] * len(participants)

    def batch_sizes(self, participants: Sequence[Participant]) -> list[int]:
        """Return b_i of each participant; their sum is that of the common batch sizes."""
        speeds = [participant.speed_ratio for participant in participants]
        shares = [1.0 if None in speeds else speed or 1.0 for speed in speeds]
        return balanced_batches(sum(p.batch_size for p in participants), shares)


def whole_parts(total: int, shares: Sequence[float]) -> list[int]:
    """Split a whole number by shares into whole parts that sum exactly (largest remainder).

    Ties go to the lowest index.

    >>> whole_parts(10, [0.5, 0.25, 0.25])
    [5, 3, 2]
    """
    whole = sum(shares)
    ideal = [total * share / whole for share in shares]
    parts = [int(part) for part in ideal]
    # Rounded, since equal remainders of large and small parts differ in their last bits.
    by_remainder = sorted(range(len(parts)), key=lambda i: (round(parts[i] - ideal[i], 9), i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def balanced_batches(total: int, shares: Sequence[float]) -> list[int]:
    """Split a batch by shares; no part is smaller than 2 samples, and the parts sum exactly.

    It must hold two samples for each.
    """
    batches = [_SMALLEST_BATCH] * len(shares)
    rest = list(range(len(shares)))
    while rest:
        left = total - _SMALLEST_BATCH * (len(shares) - len(rest))
        parts = whole_parts(left, [shares[i] for i in rest])
        enough = [i for i, part in zip(rest, parts, strict=True) if part >= _SMALLEST_BATCH]
        if len(enough) == len(rest):
            for i, part in zip(rest, parts, strict=True):
                batches[i] = part
            break
        rest = enough
    return batches


def speeds_changed(
    used: Sequence[float | None], measured: Sequence[float | None], fall: float, rise: float
) -> bool:
    """Return whether some worker's gamma left the dead band around the one in use.

    The band may be wider upwards: a worker with too many steps makes all others wait, which costs
    more than one with too few, which only waits itself.

    Parameters
    ----------
    used, measured : sequence of float or None
        Seconds per step of each worker; None where they are not known, which counts as a change.
    fall, rise : float
        Relative change of gamma, down and up, that is still ignored, >= 0.

    Examples
    --------
    >>> speeds_changed([1.0, 4.0], [2.0, 8.4], 0.1, 0.25)
    False
    >>> speeds_changed([1.0, 4.0], [1.0, 4.6], 0.1, 0.25)
    True
    """
    return any(
        a is None or b is None or not -fall <= b / a - 1 <= rise
        for a, b in zip(speed_ratios(used), speed_ratios(measured), strict=True)
    )


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} = {value} must be at least 1")
