"""Runs with real worker processes that fail in every way: they finish, and say what happened."""

from pathlib import Path
from typing import Any

import pytest

from .faults import (
    OVERFLOW,
    POISONS,
    Fault,
    Faults,
    fail_at,
    slow_at,
)
from .training import nothing_left_behind, train

pytestmark = pytest.mark.processes

FAST, OTHER, SLOW = 0, 1, 2
"""The workers' places."""

COUNTED_AS = {
    **dict.fromkeys(("nan model", "nan tensor", "nan loss", OVERFLOW), "not finite"),
    **dict.fromkeys(("raises", "no message", "another round"), "raised"),
    **dict.fromkeys(("killed", "exits"), "died"),
    **dict.fromkeys(("hangs", "stopped"), "late"),
    "out of memory": "out of memory",
}
"""All other kinds of `faults` are replies that cannot be used."""

LATE_MAYBE = "late"
"""Of a machine that has other work, any worker may be: see `training.PATIENCE_SECONDS`."""


def failures_of(summary: dict[str, Any]) -> dict[tuple[int, int], str]:
    """Return the kind of each failure by round and place of the worker."""
    places = {"fast-0": FAST, "fast-1": OTHER, "slow-2": SLOW}
    return {
        (row["round"], places[row["worker"].split()[0]]): row["kind"] for row in summary["failures"]
    }


def check(summary: dict[str, Any], *faults: Fault) -> None:
    found = failures_of(summary)
    wanted = {
        (server_round, fault.worker): COUNTED_AS.get(fault.kind, "unusable reply")
        for fault in faults
        for server_round in range(fault.first, fault.last + 1)
        if fault.kind not in ("slow", "paused")
    }
    assert {place: found.get(place) for place in wanted} == wanted
    assert {found[place] for place in found.keys() - wanted.keys()} <= {LATE_MAYBE}
    by_worker = summary["failures_by_worker"].values()
    assert sum(sum(kinds.values()) for kinds in by_worker) >= len(wanted)
    trained = (summary[f"samples{what}"] for what in ("", "_given_up", "_cut_off"))
    assert summary["samples_planned"] == sum(trained)
    assert summary["samples_given_up"] > 0
    assert summary["interrupted"] is False
    assert summary["accuracy"] > 0.9


def test_every_kind_of_failure_costs_its_own_share_and_is_counted(tmp_path: Path) -> None:
    """By two workers in turn, so that no two failures of one are in a row."""
    kinds = (*POISONS, OVERFLOW, "raises", "out of memory", "killed", "exits", "no message")
    single = [fail_at(i % 2, 4 + 2 * i, kind) for i, kind in enumerate((*kinds, "another round"))]
    slow = slow_at(SLOW, 20, 0.3), slow_at(SLOW, 22, 0.3, "paused")
    late = fail_at(SLOW, 42, "hangs"), fail_at(SLOW, 44, "stopped")
    with nothing_left_behind():
        summary = train(tmp_path / "run", Faults(*single, *slow, *late))
    check(summary, *single, *slow, *late)
    assert summary["rounds"] > 50
