"""One cell of `benchmarks.sample`, in a process of its own: plan one epoch, and describe it.

``python -m benchmarks.planned_epoch seconds|bytes TABLE NUM_SAMPLES TURNS`` prints JSON.
"""

import json
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flower_blsgd.algorithm.epoch_plan import (
    EpochPlan,
    SamplingStats,
    plan_epoch,
    round_shape,
    sampling_stats,
)
from flower_blsgd.algorithm.local_steps import Participant, SystemAwareSteps
from flower_blsgd.algorithm.sampling import LossTable, SeparatedSampler

BATCH_SIZE, LOCAL_STEPS_FAST, LOCAL_STEPS_SLOW = 128, 32, 1
HIGH_LOSS_RATIO = 0.5
WORKERS = (Participant(True, BATCH_SIZE),) * 8 + (Participant(False, BATCH_SIZE),) * 2
SHARE_UNSEEN, TIED_LOSSES = 0.3, 5
_EPOCH = 3
_PART = 2**16


@dataclass(frozen=True)
class Epoch:
    """An epoch to plan: what `Planner` hands to the algorithm."""

    table: LossTable

    def plan(self) -> EpochPlan:
        """Return the plan of the third epoch, with the paper's sampler."""
        num_samples = len(self.table)
        policy = SystemAwareSteps(LOCAL_STEPS_FAST, LOCAL_STEPS_SLOW)
        shape = round_shape(policy, WORKERS, num_samples, "samples", LOCAL_STEPS_FAST)
        per_round = sum(shape.samples_per_round)
        return plan_epoch(
            seed=0,
            epoch=_EPOCH,
            participants=WORKERS,
            shape=shape,
            sampler=SeparatedSampler(HIGH_LOSS_RATIO),
            table=self.table,
            samples_before=(_EPOCH - 1) * num_samples // per_round * per_round,
        )

    def statistics(self, plan: EpochPlan) -> SamplingStats:
        """Return what `Planner` computes of every plan."""
        per_epoch = max(1.0, len(self.table) / sum(plan.shape.samples_per_round))
        last_round = int((_EPOCH - 1) * per_epoch)
        return sampling_stats(plan, WORKERS, self.table, last_round, per_epoch)


def epoch_of(kind: str, num_samples: int) -> Epoch:
    """Return an epoch whose table is filled, without memory beside the table."""
    table = LossTable(num_samples)
    rng = np.random.default_rng(0)
    last_round = max(1, 2 * num_samples // (BATCH_SIZE * (8 * LOCAL_STEPS_FAST + 2)))
    for start in range(0, num_samples, _PART):
        losses, rounds = table.losses[start : start + _PART], table.rounds[start : start + _PART]
        rounds[:] = rng.integers(1, last_round, len(rounds), np.int32, endpoint=True)
        if kind == "distinct":
            losses[:] = _distinct(start, len(losses))
        else:
            losses[:] = rng.integers(0, TIED_LOSSES, len(losses))
            unseen = rng.random(len(losses)) < SHARE_UNSEEN
            losses[unseen], rounds[unseen] = np.inf, 0
    return Epoch(table)


def _distinct(start: int, count: int) -> np.ndarray:
    """Return floats in [0.0004, 33) without order, no two of them equal up to 2^27 samples."""
    numbers = np.arange(start, start + count, dtype=np.uint64)
    scrambled = numbers * np.uint64(2_654_435_769) % np.uint64(2**27)  # odd: a permutation
    return (scrambled.astype(np.uint32) + np.uint32(0x3A00_0000)).view(np.float32)


def seconds(epoch: Epoch, turns: int) -> dict[str, list[float]]:
    """Return the seconds of plan and statistics, and of numpy's floors, in turns."""
    num_samples = len(epoch.table)
    warm_up = epoch_of("distinct", 40_000)
    warm_up.statistics(warm_up.plan())
    rng = np.random.default_rng(0)
    taken: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        taken.setdefault(name, []).append(time.perf_counter() - began)
        return result

    for _ in range(turns):
        plan = timed("plan", epoch.plan)
        timed("statistics", partial(epoch.statistics, plan))
        del plan
        timed("permutation", lambda: rng.permutation(np.arange(num_samples, dtype=np.int32)))
        timed("partition", lambda: np.partition(epoch.table.losses, num_samples // 2))
    return taken


def peak_bytes(kind: str, num_samples: int) -> dict[str, float]:
    """Return the most bytes that are in use, the table included, as numpy and Python count them.

    And what the kernel counts: growth of the process, which at small N is the allocator's.
    """
    warm_up = epoch_of(kind, 40_000)
    warm_up.statistics(warm_up.plan())
    resident_before = _most_resident_bytes()
    tracemalloc.start()
    epoch = epoch_of(kind, num_samples)
    tracemalloc.reset_peak()
    plan = epoch.plan()
    planning = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    epoch.statistics(plan)
    describing = tracemalloc.get_traced_memory()[1]
    resident = _most_resident_bytes() - resident_before
    return {"plan": planning, "statistics": describing, "resident": resident}


def _most_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    what, kind, number, turns = sys.argv[1:]
    found = (
        seconds(epoch_of(kind, int(number)), int(turns))
        if what == "seconds"
        else peak_bytes(kind, int(number))
    )
    print(json.dumps(found))
