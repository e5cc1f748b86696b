"""Dynamic load balancing: one step each, and batches that follow the workers' throughput.

Speeds -> shares -> integers that sum exactly, one function each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .local_steps import Participant

_SMALLEST_BATCH = 2


def throughput_shares(speed_ratios: Sequence[float | None]) -> list[float]:
    """Return every worker's share of all samples per second; equal ones if a speed is unknown.

    >>> throughput_shares([1.0, 0.25])
    [0.8, 0.2]
    """
    if any(ratio is None for ratio in speed_ratios):
        return [1 / len(speed_ratios)] * len(speed_ratios)
    known = [float(ratio) for ratio in speed_ratios if ratio is not None]
    total = sum(known)
    return [ratio / total for ratio in known]


def whole_parts(total: int, shares: Sequence[float]) -> list[int]:
    """Split a whole number by shares into whole parts that sum exactly (largest remainder).

    Ties go to the lowest place.

    >>> whole_parts(10, [0.5, 0.25, 0.25])
    [5, 3, 2]
    """
    whole = sum(shares)
    ideal = [total * share / whole for share in shares]
    parts = [int(part) for part in ideal]
    # Rounded, since equal remainders of large and small parts differ in their last bits.
    by_remainder = sorted(range(len(parts)), key=lambda i: (round(parts[i] - ideal[i], 9), i))
    for place in by_remainder[: total - sum(parts)]:
        parts[place] += 1
    return parts


def balanced_batches(total: int, shares: Sequence[float]) -> list[int]:
    """Split a batch by shares; nobody gets fewer than 2 samples, and the parts sum exactly.

    Raises
    ------
    ValueError
        If the batch holds fewer than two samples for each.
    """
    if total < _SMALLEST_BATCH * len(shares):
        raise ValueError(
            f"a batch of {total} cannot be shared by {len(shares)} workers: each step needs "
            f"{_SMALLEST_BATCH} samples"
        )
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


@dataclass(frozen=True)
class BalancedBatches:
    """The policy of ``dlb``: one step each, b_i by throughput, their sum constant.

    The shares follow the throughput of the last epoch; while no speed is known they are equal.
    A worker whose share would be under 2 samples gets 2.
    """

    follows_speeds: bool = True

    def local_steps(self, participants: Sequence[Participant]) -> list[int]:
        """Return 1 for everybody."""
        return [1] * len(participants)

    def batch_sizes(self, participants: Sequence[Participant]) -> list[int]:
        """Return b_i of each participant; together they are the sum of the common ones."""
        shares = throughput_shares([participant.speed_ratio for participant in participants])
        return balanced_batches(sum(p.batch_size for p in participants), shares)

    def check(self, participants: Sequence[Participant]) -> None:
        """Refuse a batch that is too small to be shared by speed.

        Raises
        ------
        ValueError
            If the share of a worker does not round to two samples; names a batch size that does.
        """
        shares = throughput_shares([participant.speed_ratio for participant in participants])
        total = sum(participant.batch_size for participant in participants)
        smallest = min(shares)
        if total * smallest < _SMALLEST_BATCH - 0.5:
            enough = 1 + int((_SMALLEST_BATCH - 0.5) / smallest / len(shares))
            raise ValueError(
                f"batch-size = {max(p.batch_size for p in participants)} is too small for batches "
                f"by throughput (dlb): the slowest worker's share of the {total} samples of a "
                f"step is {total * smallest:.2g}, and it needs 2; use batch-size = {enough} or more"
            )
