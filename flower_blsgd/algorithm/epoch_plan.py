"""Plan of one epoch: the number of rounds, and the samples of each worker."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .local_steps import Participant, StepPolicy
from .loss_table import FloatArray, IntArray, LossTable
from .sampling import EpochRequest, SampleList, Sampler
from .selection import Selected
from .validation import checked_lists, checked_numbers

EpochMode = Literal["samples", "table"]


@dataclass(frozen=True)
class RoundShape:
    """Local steps tau_i and batch sizes b_i of every round of an epoch, in worker order.

    `table_rounds` is the number of rounds of every epoch by the rule of the paper's table; if it is
    None, it follows from the number of samples.
    """

    local_steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    table_rounds: int | None = None

    @property
    def samples_per_round(self) -> tuple[int, ...]:
        """tau_i b_i of each worker."""
        pairs = zip(self.local_steps, self.batch_sizes, strict=True)
        return tuple(steps * batch_size for steps, batch_size in pairs)


@dataclass(frozen=True)
class EpochPlan:
    """The samples of every worker in every round of one epoch.

    `epoch` counts from 1; `rounds` is >= 1. `weights` are as in `Selected`. `first_round` is the
    first round of the lists, counted from 0; above 0 if the rest of an epoch was planned again.
    """

    epoch: int
    rounds: int
    shape: RoundShape
    sample_lists: tuple[SampleList, ...]
    weights: FloatArray | None = None
    first_round: int = 0

    def indices(self, round_in_epoch: int, worker: int) -> IntArray:
        """Return the samples of one order, in training order: int32 of shape (tau_i b_i,).

        A list is cut into one block per round. The workers that share it take consecutive parts of
        each block, in worker order. `round_in_epoch` and `worker`, the index among the
        participants, are counted from 0.
        """
        assert 0 <= round_in_epoch < self.rounds, f"epoch {self.epoch} has {self.rounds} rounds"
        sample_list, block, first, count = self._deals[worker]
        start = (round_in_epoch - self.first_round) * block + first
        return sample_list.indices[start : start + count]

    @property
    def lists_end(self) -> int:
        """First round that the lists do not cover, counted from 0."""
        listed = sum(len(sample_list.indices) for sample_list in self.sample_lists)
        return self.first_round + listed // sum(self.shape.samples_per_round)

    def sample_weights(self, round_in_epoch: int, worker: int) -> FloatArray | None:
        """Return the weights of the samples of one order; None if all are 1."""
        if self.weights is None:
            return None
        weights = self.weights[self.indices(round_in_epoch, worker)]
        return None if (weights == 1).all() else weights

    @functools.cached_property
    def _deals(self) -> dict[int, tuple[SampleList, int, int, int]]:
        """Each worker's list, its block size, and start and size of the worker's part of it."""
        per_round = self.shape.samples_per_round
        deals: dict[int, tuple[SampleList, int, int, int]] = {}
        for sample_list in self.sample_lists:
            ends = list(itertools.accumulate(per_round[worker] for worker in sample_list.members))
            for worker, end in zip(sample_list.members, ends, strict=True):
                count = per_round[worker]
                deals.setdefault(worker, (sample_list, ends[-1], end - count, count))
        return deals


def rounds_of_epoch(shape: RoundShape, samples_left: int, rounds_before: int = 0) -> int:
    """Return the number of rounds of an epoch, given its samples after `rounds_before` rounds."""
    # With unchanged workers and all N samples this is floor(e N / S) - floor((e - 1) N / S). A
    # selection may leave less than one round.
    left = samples_left // sum(shape.samples_per_round)
    return max(rounds_before + 1, shape.table_rounds or rounds_before + left)


def plan_epoch(
    *,
    seed: int,
    epoch: int,
    participants: Sequence[Participant],
    shape: RoundShape,
    sampler: Sampler,
    table: LossTable,
    samples_before: int,
    samples_due: int,
    selected: Selected | None = None,
    rounds_before: int = 0,
    listed_rounds: int | None = None,
) -> EpochPlan:
    """Plan one epoch, or the rest of one after `rounds_before`: a pure function of the arguments.

    `table` has all N samples; `selected` are those of the epoch, all N if it is None.
    `samples_before` were planned in all earlier rounds. `samples_due` is the exact number of
    samples of this epoch and all earlier ones; epoch x N without selections. The lists cover
    `listed_rounds` rounds, by default all that are planned. UsageError if the sampler returned
    invalid lists.
    """
    rounds = rounds_of_epoch(shape, samples_due - samples_before, rounds_before)
    if selected is not None:
        table, samples_before = table.subset(selected.indices), (epoch - 1) * len(selected.indices)
    listed = listed_rounds or rounds - rounds_before
    request = EpochRequest(
        seed, epoch, listed, tuple(participants), shape.samples_per_round, samples_before
    )
    lists = checked_lists(sampler, sampler.sample_lists(request, table), request, len(table))
    if selected is None:
        return EpochPlan(epoch, rounds, shape, lists, None, rounds_before)
    lists = tuple(SampleList(selected.indices[of.indices], of.members) for of in lists)
    return EpochPlan(epoch, rounds, shape, lists, selected.weights, rounds_before)


def round_shape(
    policy: StepPolicy,
    participants: Sequence[Participant],
    num_samples: int,
    mode: EpochMode,
    local_steps_fast: int,
    num_workers: int | None = None,
    epoch_samples: int | None = None,
) -> RoundShape:
    """Return the steps and batch sizes of all workers, scaled down to fit a round into an epoch.

    In the mode "samples", E epochs are E N samples, to within one round. If this epoch has fewer
    than N samples, `epoch_samples` is their number; one step of every worker always fits.

    The mode "table" is the rule that reproduces the communications per epoch in the paper's table.
    It uses B P, or the sum of the b_i if some are given. `num_workers` is P, including workers that
    do not train; by default all train. Synchronous SGD has `local_steps_fast` (tau_fast of the run)
    rounds where local SGD has one.

    ValueError if not even one step of every worker fits into N samples; the message names the
    largest batch size that does, if any. UsageError if the policy returned invalid numbers.
    """
    count = len(participants)
    steps = policy.local_steps(participants)
    steps = checked_numbers(policy, "local_steps", steps, count, 1, whole=True)
    sizes = policy.batch_sizes(participants)
    batch_sizes = tuple(checked_numbers(policy, "batch_sizes", sizes, count, 2, whole=True))
    batch_size = max(participant.batch_size for participant in participants)
    counted = (num_workers if mode == "table" else None) or len(participants)
    given = any(participant.given_batch for participant in participants)

    def samples_of_one_step(batch_size: int) -> int:
        same = [replace(participant, batch_size=batch_size) for participant in participants]
        if mode == "table":  # B P, where no batch was given
            return sum(p.own_batch for p in same) + (counted - count) * batch_size
        return sum(policy.batch_sizes(same))

    one_step = samples_of_one_step(batch_size)
    if one_step > num_samples:
        smaller = range(batch_size - 1, 1, -1)
        largest = next((b for b in smaller if samples_of_one_step(b) <= num_samples), None)
        fix = (
            f"the largest that fits is batch-size = {largest}"
            if largest
            else f"use fewer workers{', a smaller batch=' if given else ''} or more data"
        )
        sizes_of = " with batch= of workers" if given else ""
        raise ValueError(
            f"batch-size = {batch_size}{sizes_of} is too large: one step of all {counted} workers "
            f"needs more than the {num_samples} training samples; {fix}"
        )
    if mode == "samples":
        most, one = max(steps), (1,) * count
        room = num_samples if epoch_samples is None else epoch_samples
        fitting = range(min(most, num_samples), 0, -1)
        shapes = (RoundShape(_shrunk(steps, k, most), batch_sizes) for k in fitting)
        return next(s for s in shapes if s.local_steps == one or sum(s.samples_per_round) <= room)
    synchronous = max(steps) == 1
    fast = [s for s, participant in zip(steps, participants, strict=True) if participant.fast]
    wanted = local_steps_fast if synchronous else max(fast or steps)
    longest = min(wanted, num_samples // one_step)
    rounds = num_samples // (one_step * longest)
    if synchronous:  # an epoch has the samples of all workers, even if some do not train
        rounds = rounds * longest * one_step // sum(p.own_batch for p in participants)
    return RoundShape(_shrunk(steps, longest, wanted), batch_sizes, rounds)


def _shrunk(steps: Sequence[int], longest: int, largest: int) -> tuple[int, ...]:
    """Scale all steps by longest / largest, rounded down, each at least 1."""
    return tuple(max(1, number * longest // largest) for number in steps)
