"""The line that says which setting makes fast workers wait."""

from typing import Any

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.results.waiting import waiting_note
from flower_blsgd.strategy.workers import WorkerRegistry

from ..in_process_grid import fast_profile, slow_profile
from .records import record, row


def note(
    config: dict[str, Any],
    seconds: tuple[float, float] = (2.0, 8.0),
    tau: tuple[int, int] = (32, 8),
    known: tuple[float, float] = (0.0625, 1.0),
    measured: bool = True,
    **slow: Any,
) -> str:
    """Return it for rounds of 10 s, with a fast worker and another: how long they compute."""
    profiles = [fast_profile(0, seconds_per_step=known[0])]
    other = fast_profile if slow.pop("fast", False) else slow_profile
    profiles.append(other(1, seconds_per_step=known[1], **slow))
    workers = WorkerRegistry.of_profiles(profiles).workers
    rows = []
    for worker in workers:
        i, worker.measured = worker.index, measured
        done = {"local_steps": tau[i], "completed_steps": tau[i], "compute_seconds": seconds[i]}
        rows.append(row(i, worker.fast, **done, waiting_seconds=max(seconds) - seconds[i]))
    return waiting_note(RunConfig(**config), workers, [record(*rows)] * 2)


COARSE = {"tau": (2, 1), "known": (1.0, 8.0)}
TOO_MANY = 'local-steps-slow = 8 is too large; set local-steps-slow = "auto"'


def test_fast_workers_that_wait_little_say_nothing() -> None:
    fixed = {"local_steps_slow": 8}
    assert note(fixed, seconds=(6.0, 8.0)) == ""  # 2 s of 10 s are 20 %
    assert note(fixed, seconds=(5.5, 8.0)).startswith("fast workers wait 25% of the time")
    assert note(fixed, seconds=(8.0, 2.0)) == ""
    assert waiting_note(RunConfig(), [], []) == ""


@pytest.mark.parametrize(
    ("config", "values", "cause"),
    [
        ({"local_steps_slow": 8}, {}, TOO_MANY),
        ({"local_steps_slow": 8}, {"steps": 8}, "its steps= is too large; remove it"),
        (  # 2 : 4 steps became 1 : 1
            {"local_steps_slow": 2},
            {"tau": (1, 1)},
            "an epoch is too short for rounds of its 2 steps; use a smaller batch-size",
        ),
        ({}, {"steps": 2, "tau": (1, 1)}, "too short for rounds of its 2 steps; use"),
        (
            {"algorithm": "sync-sgd"},
            {},
            'steps = "one" gives all workers the same number; set steps = "system-aware"',
        ),
        (
            {"average": "gradients", "task": "script.py"},
            {},
            "set batch=30 for fast-0 (cpu:0), batch=2 for slow-1 (cpu:1)",  # 32 in all, 256 : 16
        ),
        (
            {"algorithm": "balanced-local-sgd"},
            {},
            'steps = "same" gives all workers the same number; set',
        ),
        (
            {"local_steps_slow": 8},
            {"fast": True},
            'all fast workers do 32 steps; set local-steps-slow = "auto"',
        ),
        ({}, {"fast": True, "known": (0.0625, 0.25)}, "than measured; set rebalance = true"),
        # 8 steps of 1 s were to take 2 s: they did not do so
        ({}, {"known": (0.0625, 0.25)}, "take longer than measured; set rebalance = true"),
        ({"clock": "device"}, {"known": (0.0625, 0.25), "measured": False}, "than given; set"),
        # one step of 8 s beside two of 1 s
        (
            {"local_steps_fast": 2},
            COARSE,
            'of 2 steps are too short; set local-steps-fast = "auto"',
        ),
        (
            {"local_steps_fast": "auto"},
            COARSE,
            "of 2 steps are too short; use a smaller batch-size",
        ),
        ({}, COARSE, "of 2 steps are too short; use a smaller batch-size"),
        ({}, {**COARSE, "batch_size": 99}, "of 2 steps are too short; set its batch= below 99"),
        ({"shrink_slow_batch": False}, COARSE, "too short; set shrink-slow-batch = true"),
        ({}, {"known": (0.0625, 0.0)}, "the speed of slow-1 (cpu:1) is unknown"),
        (
            {},
            {"known": (0.0, 1.0)},
            "the speed of fast-0 (cpu:0) is unknown; set its seconds-per",
        ),
    ],
)
def test_cause_and_way_out(config: dict[str, Any], values: dict[str, Any], cause: str) -> None:
    found = note(config, **values)
    waited_for = "fast-1" if values.get("fast") else "slow-1"
    share = 30 if values.get("fast") else 60  # the one that is waited for is a fast one, too
    assert found.startswith(f"fast workers wait {share}% of the time for {waited_for} (cpu:1): ")
    assert cause in found


def test_fast_worker_does_not_wait_for_itself() -> None:
    """It computes for 2 s, then for 10 s, and waits in between for a worker that does 8 s."""
    workers = WorkerRegistry.of_profiles([fast_profile(0), slow_profile(1)]).workers
    did = {"local_steps": 8, "completed_steps": 8}
    rounds = [
        record(row(0, compute_seconds=2.0, waiting_seconds=6.0, **did),
               row(1, fast=False, compute_seconds=8.0, **did)),
        record(row(0, compute_seconds=10.0, **did),
               row(1, fast=False, compute_seconds=2.0, waiting_seconds=8.0, **did)),
    ]  # fmt: skip
    assert waiting_note(RunConfig(local_steps_slow=8), workers, rounds) == ""


@pytest.mark.parametrize("config", [{"algorithm": "dlb"}, {"rebalance": True}])
def test_what_the_next_epoch_changes_by_itself_is_not_mentioned(config: dict[str, Any]) -> None:
    assert note(config, known=(0.0625, 0.25)) == ""
    assert note(config, known=(0.0625, 0.0)) == ""
