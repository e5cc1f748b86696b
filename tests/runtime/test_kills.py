"""Runs of the command that are killed, or lose a worker, at random moments."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .kill_runs import Outcome, kill_one

VICTIMS = ("parent", "worker", "parent", "worker")


@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="this system has no /proc")
def test_killed_runs_leave_nothing_and_lost_workers_are_told() -> None:
    """`python -m tests.runtime.kill_runs 100` does more of them."""

    def kill(number: int) -> Outcome:
        return kill_one(random.Random(number), VICTIMS[number])

    with ThreadPoolExecutor(2) as two_at_a_time:
        outcomes = list(two_at_a_time.map(kill, range(len(VICTIMS))))
    assert [(o.faults, o.output) for o in outcomes if o.faults] == []
    assert {o.victim for o in outcomes} >= {"parent", "worker"}
