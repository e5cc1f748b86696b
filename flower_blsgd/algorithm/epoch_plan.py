"""The plan of one epoch: how many rounds, and which samples each worker gets in each."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from .local_steps import Participant, StepPolicy, batch_sizes_of, shrunk_steps
from .loss_table import IntArray, LossTable
from .sampling import EpochRequest, Pool, Sampler

EpochMode = Literal["samples", "table"]


@dataclass(frozen=True)
class RoundShape:
    """What every round of an epoch looks like.

    Parameters
    ----------
    local_steps : tuple of int
        tau_i of each worker, in worker order.
    batch_sizes : tuple of int
        b_i of each worker.
    table_samples : int (default: 0)
        B P tau_F of the rule for the paper's table; P counts those that do not train as well.
    table_rounds : tuple of int (default: (1, 1))
        Our rounds for one of its rounds, as a fraction: tau_F for synchronous SGD, times P / P_F
        where only fast workers train.
    """

    local_steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    table_samples: int = 0
    table_rounds: tuple[int, int] = (1, 1)

    @property
    def samples_per_round(self) -> tuple[int, ...]:
        """tau_i b_i of each worker."""
        pairs = zip(self.local_steps, self.batch_sizes, strict=True)
        return tuple(steps * batch_size for steps, batch_size in pairs)


@dataclass(frozen=True)
class EpochPlan:
    """Who trains on which samples, round by round.

    Parameters
    ----------
    epoch : int
        Counted from 1.
    rounds : int
        Communication rounds of this epoch, >= 1.
    shape : RoundShape
        Steps and batch sizes of every worker.
    pools : tuple of Pool
        The samples, and who shares them.
    num_samples : int
        N.
    """

    epoch: int
    rounds: int
    shape: RoundShape
    pools: tuple[Pool, ...]
    num_samples: int

    def indices(self, round_in_epoch: int, worker: int) -> IntArray:
        """Return the samples of one order, in training order.

        A pool is cut into one block per round, and a block is dealt in list order to the pool's
        workers in worker order.

        Parameters
        ----------
        round_in_epoch : int
            Counted from 0.
        worker : int
            Position of the worker among the participants.

        Returns
        -------
        numpy.ndarray
            int32 of shape (tau_i b_i,).

        Raises
        ------
        ValueError
            If the epoch has no such round or worker.
        """
        if not 0 <= round_in_epoch < self.rounds:
            raise ValueError(f"epoch {self.epoch} has {self.rounds} rounds, not {round_in_epoch}")
        if worker not in self._deals:
            raise ValueError(f"worker {worker} has no samples in epoch {self.epoch}")
        pool, block, first, count = self._deals[worker]
        start = round_in_epoch * block + first
        return pool.indices[start : start + count]

    @functools.cached_property
    def _deals(self) -> dict[int, tuple[Pool, int, int, int]]:
        """Each worker's pool, the pool's samples per round, and the worker's place in them."""
        per_round = self.shape.samples_per_round
        deals: dict[int, tuple[Pool, int, int, int]] = {}
        for pool in self.pools:
            ends = list(itertools.accumulate(per_round[worker] for worker in pool.members))
            for worker, end in zip(pool.members, ends, strict=True):
                count = per_round[worker]
                deals.setdefault(worker, (pool, ends[-1], end - count, count))
        return deals

    @property
    def num_planned(self) -> int:
        """Samples, with repeats, that all workers are given in this epoch."""
        return sum(len(pool.indices) for pool in self.pools)

    def share_left_out(self, participants: Sequence[Participant]) -> float:
        """Return the share of the N samples that no fast worker is given in this epoch."""
        given = np.zeros(self.num_samples, np.bool_)
        for worker, participant in enumerate(participants):
            if participant.fast:
                for round_in_epoch in range(self.rounds):
                    given[self.indices(round_in_epoch, worker)] = True
        return 1.0 - np.count_nonzero(given) / self.num_samples


def plan_epoch(
    *,
    seed: int,
    epoch: int,
    mode: EpochMode,
    participants: Sequence[Participant],
    shape: RoundShape,
    sampler: Sampler,
    table: LossTable,
    samples_before: int,
) -> EpochPlan:
    """Plan one epoch.

    Parameters
    ----------
    seed : int
        The run's seed.
    epoch : int
        Counted from 1.
    mode : {"samples", "table"}
        ``"samples"``: E epochs are E N samples to within one round. ``"table"``: the rule that
        reproduces the communications per epoch of the paper's table.
    participants : sequence of Participant
        All workers that take part, in worker order.
    shape : RoundShape
        From `round_shape`.
    sampler : Sampler
        Chooses the samples.
    table : LossTable
        Its length is N.
    samples_before : int
        Samples planned in all earlier epochs.

    Returns
    -------
    EpochPlan
        A pure function of the arguments.
    """
    num_samples = len(table)
    samples_per_round = shape.samples_per_round
    if mode == "samples":
        # With an unchanged team this is floor(e N / S) - floor((e - 1) N / S).
        rounds = (epoch * num_samples - samples_before) // sum(samples_per_round)
    else:
        rounds = _table_rounds(num_samples, shape)
    request = EpochRequest(
        seed, epoch, rounds, tuple(participants), samples_per_round, samples_before
    )
    pools = tuple(sampler.pools(request, table))
    return EpochPlan(epoch, rounds, shape, pools, num_samples)


def round_shape(
    policy: StepPolicy,
    participants: Sequence[Participant],
    num_samples: int,
    mode: EpochMode,
    local_steps_fast: int,
    num_workers: int | None = None,
) -> RoundShape:
    """Ask the policy for everybody's steps and shrink them until a round fits into an epoch.

    Parameters
    ----------
    policy : StepPolicy
        Proposes tau_i.
    participants : sequence of Participant
        All workers that take part.
    num_samples : int
        N.
    mode : {"samples", "table"}
        As in `plan_epoch`.
    local_steps_fast : int
        tau_fast of the run; in table mode synchronous SGD does that many rounds for one.
    num_workers : int, optional
        P with those that do not train, which the table counts too; all train by default.

    Returns
    -------
    RoundShape
        Steps scaled by the largest k that fits, if they had to be.

    Raises
    ------
    ValueError
        If not even one step of every worker fits; names the largest batch size that does.
    """
    steps = policy.local_steps(participants)
    batch_sizes = tuple(batch_sizes_of(policy, participants))
    if mode == "table":
        shape = _table_shape(
            steps,
            batch_sizes,
            participants,
            num_samples,
            local_steps_fast,
            num_workers or len(participants),
        )
    else:
        shape = _samples_shape(steps, batch_sizes, num_samples)
    if shape is not None:
        return shape
    counted = (num_workers or len(steps)) if mode == "table" else len(steps)
    batch_size = max(participant.batch_size for participant in participants)
    largest = num_samples // counted
    while mode == "samples" and largest + 1 < batch_size:  # those with smaller batches need less
        larger = [replace(p, batch_size=largest + 1) for p in participants]
        if sum(batch_sizes_of(policy, larger)) > num_samples:
            break
        largest += 1
    way_out = (
        f"the largest that fits is batch-size = {largest}"
        if largest >= 2
        else "use fewer workers or more data"
    )
    raise ValueError(
        f"batch-size = {batch_size} is too large: one step of all {counted} workers "
        f"needs more than the {num_samples} samples there are; {way_out}"
    )


def mean_rounds_per_epoch(shape: RoundShape, num_samples: int, mode: EpochMode) -> float:
    """Return the rounds of an average epoch: N / S, or those of the paper's table."""
    if mode == "table":
        return _table_rounds(num_samples, shape)
    return num_samples / sum(shape.samples_per_round)


def _samples_shape(
    steps: Sequence[int], batch_sizes: tuple[int, ...], num_samples: int
) -> RoundShape | None:
    for longest in range(max(steps), 0, -1):
        shape = RoundShape(tuple(shrunk_steps(steps, longest)), batch_sizes)
        if sum(shape.samples_per_round) <= num_samples:
            return shape
    return None


def _table_shape(
    steps: Sequence[int],
    batch_sizes: tuple[int, ...],
    participants: Sequence[Participant],
    num_samples: int,
    local_steps_fast: int,
    num_workers: int,
) -> RoundShape | None:
    synchronous = max(steps) == 1
    fast = [s for s, participant in zip(steps, participants, strict=True) if participant.fast]
    wanted = local_steps_fast if synchronous else max(fast or steps)
    one_step = num_workers * max(participant.batch_size for participant in participants)
    fitting = min(wanted, num_samples // one_step)
    if fitting < 1:
        return None
    shrunk = tuple(shrunk_steps(steps, fitting, wanted))
    rounds = (fitting * num_workers, len(steps)) if synchronous else (1, 1)
    return RoundShape(shrunk, batch_sizes, one_step * fitting, rounds)


def _table_rounds(num_samples: int, shape: RoundShape) -> int:
    ours, for_theirs = shape.table_rounds
    return num_samples // shape.table_samples * ours // for_theirs
