"""Runs of the command that are killed, or lose a worker, at random moments."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .kill_runs import SETTINGS, Outcome, kill_one

ENDLESS = ("epochs=1000", *SETTINGS[1:])
RUNS = (("parent", 9, ENDLESS), ("worker", 4, SETTINGS))
"""Who is killed, a seed of the moment, and in which run: nobody is killed after the end."""


@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="this system has no /proc")
def test_killed_runs_leave_nothing_and_lost_workers_are_told() -> None:
    """`python -m tests.runtime.kill_runs 100` does more of them."""

    def kill(run: tuple[str, int, tuple[str, ...]]) -> Outcome:
        victim, seed, settings = run
        return kill_one(random.Random(seed), victim, settings)

    with ThreadPoolExecutor(2) as two_at_a_time:
        outcomes = list(two_at_a_time.map(kill, RUNS))
    assert [(o.faults, o.output) for o in outcomes if o.faults] == []
    assert [o.victim for o in outcomes] == ["parent", "worker"]
