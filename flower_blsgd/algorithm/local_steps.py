"""Choose the local steps of each worker in one communication round (tau in the paper).

Also chooses the samples per step if they differ between workers, and decides which changes in speed
are large enough to act on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

DEFAULT_LOCAL_STEPS = 32
"""Default of tau_fast."""

FAST_SPEED_RATIO = 0.7
"""A worker without a named tier is fast if its throughput exceeds this share of the highest."""

MOST_AUTO_STEPS = 512
"""Upper limit of `fewest_steps`."""

_LADDER = [n for n in range(1, 65) if n < 8 or n % (1 << n.bit_length() - 3) == 0]
_MOST_LOST, _MOST_OVERHEAD = 0.05, 0.04
"""Candidates of `fewest_steps` (1 to 8, 10, 12, 14, 16, 20, ..., 64), and accepted shares of a
round. Two measurements differ by a few percent. With more candidates, or a smaller lost share, the
choice would vary from run to run.
"""

_MARGIN = 0.05
"""By how much a slower worker may fall behind its measured speed; see `fewest_steps`."""

_ONE_STEP_FITS = 0.75
_SMALLEST_BATCH = 2

Clock = Literal["wall", "device"]
"""How speeds are measured: with all workers computing, or with each worker alone."""


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
        gamma: seconds per step of the fastest worker over those of this worker, each with its own
        batch size; at most 1 if the batch sizes are equal. None if the speed is unknown.
    given_steps, given_batch : int, optional
        ``steps=`` and ``batch=`` of the worker in the worker specification.
    """

    fast: bool
    batch_size: int
    speed_ratio: float | None = None
    given_steps: int | None = None
    given_batch: int | None = None

    @property
    def own_batch(self) -> int:
        """The given batch size of this worker, else B."""
        return self.given_batch or self.batch_size


class StepPolicy(Protocol):
    """Rule for the local steps of every worker, given all workers.

    Subclass it and implement `local_steps`; everything else has defaults. A policy is *open* while
    its tau_fast is not set. `fewest_steps` then chooses it before the first round, and
    `with_local_steps` sets it.
    """

    follows_speeds: bool = False
    """Whether the policy needs new speed ratios after every epoch."""
    chooses_batches: bool = False
    """Whether the policy chooses b_i of every worker; then users cannot give any."""

    @property
    def is_open(self) -> bool:
        """Whether tau_fast is not chosen yet."""
        return False

    @property
    def local_steps_fast(self) -> int | None:
        """tau_fast, if the policy has such a number."""
        return None

    def with_local_steps(self, local_steps_fast: int) -> "StepPolicy":
        """Return the policy with this tau_fast if it is open, else the policy itself."""
        return self

    def goes_by_speed(self, participant: Participant) -> bool:
        """Return whether the steps of a participant follow from its speed ratio."""
        return False

    @property
    def needs_speeds(self) -> bool:
        """Whether the policy needs the speed ratios of the workers; they are then measured."""
        return self.is_open

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return the steps of each participant, in order, each >= 1."""
        ...

    def batch_sizes(self, participants: Sequence[Participant]) -> list[int]:
        """Return b_i, the samples per step, of each participant, each >= 2."""
        return [participant.own_batch for participant in participants]


def fastest_worker(
    seconds_per_step: Sequence[float | None], batch_sizes: Sequence[int]
) -> int | None:
    """Return the index of the worker with the most samples per second; None if all are unknown."""
    known = [
        (seconds / size, seconds, index)
        for index, (seconds, size) in enumerate(zip(seconds_per_step, batch_sizes, strict=True))
        if seconds is not None
    ]
    return min(known)[2] if known else None


def speed_ratios(
    seconds_per_step: Sequence[float | None], batch_sizes: Sequence[int]
) -> list[float | None]:
    """Return gamma of every worker; None if its seconds per step are unknown.

    gamma may be above 1: a worker with a smaller batch than the fastest one, and nearly as fast,
    takes more steps in the same time.
    """
    fastest = fastest_worker(seconds_per_step, batch_sizes)
    first = None if fastest is None else seconds_per_step[fastest]
    return [seconds and first and first / seconds for seconds in seconds_per_step]


def proportional_steps(speed_ratio: float, local_steps_fast: int) -> int:
    """Return ``max(1, floor(gamma tau_fast + 1/2))``."""
    return max(1, math.floor(speed_ratio * local_steps_fast + 0.5))


def shrunk_batch(speed_ratio: float, local_steps_fast: int, batch_size: int) -> int:
    """Return b_i, smaller for a worker that is too slow for one whole step in a round.

    ``min(B, max(2, floor(gamma tau_fast B + 1/2)))`` if gamma tau_fast < 3/4, else B. B is the
    worker's own batch size if one was given.
    """
    steps = speed_ratio * local_steps_fast
    if steps >= _ONE_STEP_FITS:
        return batch_size
    return min(batch_size, max(_SMALLEST_BATCH, math.floor(steps * batch_size + 0.5)))


@dataclass(frozen=True)
class SameSteps(StepPolicy):
    """Equal steps for all workers: balanced local SGD, or synchronous SGD with 1 step.

    Parameters
    ----------
    steps : int, optional
        Steps per round; None leaves the policy open.
    """

    steps: int | None

    def __post_init__(self) -> None:
        _at_least_one("steps", self.steps)

    @property
    def is_open(self) -> bool:
        """Whether the number of steps is not chosen yet."""
        return self.steps is None

    def with_local_steps(self, local_steps_fast: int) -> StepPolicy:
        """Return the policy with this number of steps, if it is open."""
        return replace(self, steps=local_steps_fast) if self.is_open else self

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return the same number of steps for all participants."""
        assert self.steps is not None, "open policy"
        return [self.steps] * len(participants)


@dataclass(frozen=True)
class SystemAwareSteps(StepPolicy):
    """Local steps in proportion to the speed of each worker (the paper's method).

    A worker of any tier takes its speed ratio times `local_steps_fast`, rounded. An unknown speed
    ratio counts as 1. With `local_steps_slow`, nothing follows from speeds: every fast worker takes
    `local_steps_fast`, and every slow one `local_steps_slow`. The ``given_steps`` of a worker take
    precedence.

    Parameters
    ----------
    local_steps_fast : int, optional
        tau_fast: steps per round of the fastest worker; None leaves the policy open.
    local_steps_slow : int, optional
        Steps per round of every slow worker, to repeat a printed setting.
    shrink_slow_batch : bool (default: True)
        Whether a worker that is too slow for one step in a round gets a smaller batch, if its steps
        depend on its speed.
    """

    local_steps_fast: int | None = DEFAULT_LOCAL_STEPS
    local_steps_slow: int | None = None
    shrink_slow_batch: bool = True

    def __post_init__(self) -> None:
        _at_least_one("local_steps_fast", self.local_steps_fast)
        _at_least_one("local_steps_slow", self.local_steps_slow)

    @property
    def is_open(self) -> bool:
        """Whether tau_fast is not chosen yet."""
        return self.local_steps_fast is None

    @property
    def needs_speeds(self) -> bool:
        """Whether steps, or the choice of tau_fast, follow from speed ratios."""
        return self.local_steps_slow is None or self.is_open

    def with_local_steps(self, local_steps_fast: int) -> StepPolicy:
        """Return the policy with this tau_fast, if it is open."""
        return replace(self, local_steps_fast=local_steps_fast) if self.is_open else self

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return the steps of each participant."""
        return [self._steps_of(participant) for participant in participants]

    def batch_sizes(self, participants: Sequence[Participant]) -> list[int]:
        """Return b_i of each participant: given, common or shrunk."""
        return [
            shrunk_batch(p.speed_ratio, self._tau_fast, p.own_batch)
            if self.shrink_slow_batch and p.speed_ratio is not None and self.goes_by_speed(p)
            else p.own_batch
            for p in participants
        ]

    def goes_by_speed(self, participant: Participant) -> bool:
        """Return whether the steps of a participant follow from its speed ratio."""
        return participant.given_steps is None and self.local_steps_slow is None

    @property
    def _tau_fast(self) -> int:
        assert self.local_steps_fast is not None, "open policy"
        return self.local_steps_fast

    def _steps_of(self, participant: Participant) -> int:
        if participant.given_steps is not None:
            return participant.given_steps
        if self.local_steps_slow is None:
            return proportional_steps(participant.speed_ratio or 1.0, self._tau_fast)
        return self._tau_fast if participant.fast else self.local_steps_slow


def fewest_steps(
    policy: StepPolicy,
    participants: Sequence[Participant],
    overhead_steps: float | None = None,
) -> int:
    """Return the smallest tau_fast of an open policy that wastes little time.

    Steps are whole numbers, so workers wait. The choice starts with the smallest candidate for
    which waiting costs at most 5 % of the samples per second and no batch is shrunk by more, or
    with the best candidate if none qualifies; one that is up to a quarter larger replaces it if it
    is better. A slow worker that waits costs little, so it waits more often than a fast one. The
    number is then doubled while everything except computing takes more than 4 % of a round, up to
    512. For a single worker, averaging changes nothing, so it takes 64 or, for this reason, more.
    Last, tau_fast grows by up to an eighth if less is lost then should the others be 5 % slower
    than measured: the fastest worker does not wait for them.

    `overhead_steps` is the duration of one round without computing, in steps of the fastest worker.
    If it is unknown, the default tau_fast is the lower limit. If it is 0, rounds are the shortest.
    """
    least = float(DEFAULT_LOCAL_STEPS)
    if overhead_steps is not None:
        least = overhead_steps * (1 / _MOST_OVERHEAD - 1)
    if len(participants) == 1 and overhead_steps != 0:
        least = max(least, _LADDER[-1])
    lost = {}
    for n in _LADDER:
        its = policy.with_local_steps(n)
        lost[n] = max(_waiting_share(its, n, participants), _cut_share(its, participants))
    first = min(_LADDER, key=lambda n: max(_MOST_LOST, lost[n]))
    steps = min((n for n in _LADDER if first <= n <= 1.25 * first), key=lambda n: lost[n])
    while steps < least and 2 * steps <= MOST_AUTO_STEPS:
        steps *= 2

    def most_lost(n: int) -> float:
        its = policy.with_local_steps(n)
        shares = [_waiting_share(its, n, participants, margin) for margin in (0.0, _MARGIN)]
        return round(max(shares), 2)

    return min(range(steps, min(steps + steps // 8, MOST_AUTO_STEPS) + 1), key=most_lost)


def _waiting_share(
    policy: StepPolicy,
    local_steps_fast: int,
    participants: Sequence[Participant],
    margin: float = 0.0,
) -> float:
    """Return the share of the samples per second that waiting costs.

    All but the fastest worker are slower by `margin` than their speed ratios say.
    """
    steps, sizes = policy.local_steps(participants), policy.batch_sizes(participants)
    fastest = max((p.speed_ratio or 0.0 for p in participants), default=0.0)
    longest = float(local_steps_fast)  # in steps of the fastest worker
    computed = possible = 0.0
    for number, batch_size, p in zip(steps, sizes, participants, strict=True):
        if not p.speed_ratio:
            continue
        samples, seconds = float(p.own_batch * p.speed_ratio), float(local_steps_fast)
        if policy.goes_by_speed(p):
            seconds = number * batch_size / p.own_batch / p.speed_ratio
            longest = max(longest, seconds / (1 - margin) if p.speed_ratio < fastest else seconds)
        computed, possible = computed + samples * seconds, possible + samples
    return 1 - computed / (possible * longest) if possible else 0.0


def _cut_share(policy: StepPolicy, participants: Sequence[Participant]) -> float:
    """Return the largest share by which the batch of a worker is shrunk."""
    sizes = policy.batch_sizes(participants)
    return max(1 - size / p.own_batch for size, p in zip(sizes, participants, strict=True))


@dataclass(frozen=True)
class BalancedBatches(StepPolicy):
    """One step per worker, and batch sizes by throughput with a constant sum (``dlb``).

    The shares follow the throughput of the last epoch, and in the first one measured or given
    speeds; without known speeds they are equal. The smallest batch is 2 samples.
    """

    needs_speeds = True
    follows_speeds = True
    chooses_batches = True

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return 1 for every worker."""
        return [1] * len(participants)

    def batch_sizes(self, participants: Sequence[Participant]) -> list[int]:
        """Return b_i of each participant; the sum is B times the number of participants."""
        speeds = [participant.speed_ratio for participant in participants]
        shares = [1.0 if None in speeds else speed or 1.0 for speed in speeds]
        return balanced_batches(sum(p.batch_size for p in participants), shares)


def whole_parts(total: int, shares: Sequence[float]) -> list[int]:
    """Split a whole number by shares into whole parts that add up to it (largest remainder).

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
    """Split `total` samples, at least 2 per share, into batches of at least 2 that add up to it."""
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
    used: Sequence[float | None],
    measured: Sequence[float | None],
    fall: float,
    rise: float,
    batch_sizes: Sequence[int],
) -> bool:
    """Return whether the gamma of some worker left the dead band around the gamma in use.

    `used` and `measured` are seconds per step; None, if unknown, counts as a change. `fall` and
    `rise`, >= 0, are the relative changes of gamma, down and up, that are ignored. The band may be
    wider upwards: a worker with too many steps makes all others wait, but one with too few only
    waits itself.
    """
    return any(
        a is None or b is None or not -fall <= b / a - 1 <= rise
        for a, b in zip(
            speed_ratios(used, batch_sizes), speed_ratios(measured, batch_sizes), strict=True
        )
    )


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name} = {value} must be at least 1")
