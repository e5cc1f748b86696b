"""Seconds and bytes to plan an epoch of N samples, N = 10^4 ... 10^8, and to describe the plan.

The paper's sampler, 8 fast workers with 32 steps and 2 slow ones with 1, batch size 128. Two loss
tables: "distinct" has another loss for every sample; in "ties" three samples of ten were never
seen and the others share five losses. Each cell is a process of its own. Seconds: beside numpy's
own shuffle of N indices (int32) and its partition of the table, in turns. Bytes: the most that is
in use at any time, the loss table (8 bytes per sample) included, as tracemalloc counts what Python
and numpy allocate; and by how much the process grew (getrusage), for a check.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from flower_blsgd.runtime.devices import format_bytes, free_bytes

from .planned_epoch import (
    BATCH_SIZE,
    HIGH_LOSS_RATIO,
    LOCAL_STEPS_FAST,
    LOCAL_STEPS_SLOW,
    SHARE_UNSEEN,
    TIED_LOSSES,
)
from .rows import Measured, Row, conditions, main, not_run, row, with_goal

TURNS = {10**4: 31, 10**5: 15, 10**6: 7, 10**7: 5, 10**8: 2}
QUICK_TURNS = {10**4: 7, 10**5: 5, 10**6: 3, 10**7: 3}
TABLES = ("distinct", "ties")
GOAL_SECONDS = {10**7: 1.0, 10**8: 15.0}
GOAL_BYTES = 20
NEEDED_BYTES_PER_SAMPLE = 24
NEEDED_BYTES = 200_000_000


def measure(quick: bool) -> Measured:
    """Measure every N with both tables."""
    rows: list[Row] = []
    turns = QUICK_TURNS if quick else TURNS
    for num_samples, number in turns.items():
        for kind in TABLES:
            rows += cell(kind, num_samples, number)
    return rows, conditions(
        sampler="separated",
        high_loss_ratio=HIGH_LOSS_RATIO,
        workers=f"8 x {LOCAL_STEPS_FAST} steps, 2 x {LOCAL_STEPS_SLOW} step",
        batch_size=BATCH_SIZE,
        ties=f"{SHARE_UNSEEN:.0%} unseen, {TIED_LOSSES} losses",
        turns={f"{num_samples:.0e}": number for num_samples, number in turns.items()},
        warm_up="a small epoch, left out",
    )


def cell(kind: str, num_samples: int, turns: int) -> list[Row]:
    """Return the rows of one table."""
    name = f"N = 10^{len(str(num_samples)) - 1}, {kind}"
    needed, free = NEEDED_BYTES + NEEDED_BYTES_PER_SAMPLE * num_samples, free_bytes()
    if free is not None and needed > free:
        reason = f"needs {format_bytes(needed)}, but only {format_bytes(free)} is free"
        return [
            not_run(f"{name}: plan", reason, "s"),
            not_run(f"{name}: statistics", reason, "s"),
            not_run(f"{name}: peak memory", reason, "bytes per sample"),
        ]
    taken = in_child("seconds", kind, num_samples, turns)
    peak = in_child("bytes", kind, num_samples, turns)
    both = _sums(taken["plan"], taken["statistics"])
    floor = _sums(taken["permutation"], taken["partition"])
    rows = [
        row(f"{name}: plan", taken["plan"], "s", floor, "shuffle + partition"),
        row(f"{name}: statistics", taken["statistics"], "s", taken["partition"], "partition"),
        row(f"{name}: both", both, "s", floor, "shuffle + partition"),
        row(f"{name}: numpy's shuffle", taken["permutation"], "s"),
        row(f"{name}: numpy's partition", taken["partition"], "s"),
    ]
    per_sample = {what: [count / num_samples] for what, count in peak.items()}
    memory = [
        row(f"{name}: peak memory, plan", per_sample["plan"], "bytes per sample"),
        row(f"{name}: peak memory, statistics", per_sample["statistics"], "bytes per sample"),
    ]
    if num_samples not in GOAL_SECONDS:
        return rows + memory
    rows[2] = with_goal(rows[2], at_most=GOAL_SECONDS[num_samples])
    memory = [with_goal(one, at_most=GOAL_BYTES) for one in memory]
    # Of a small N the allocator keeps enough from before: the process does not grow.
    growth = row(f"{name}: growth of the process", per_sample["resident"], "bytes per sample")
    return [*rows, *memory, growth]


def _sums(first: list[float], second: list[float]) -> list[float]:
    return [sum(pair) for pair in zip(first, second, strict=True)]


def in_child(what: str, kind: str, num_samples: int, turns: int) -> dict[str, Any]:
    """Return what `planned_epoch` measures in a fresh process."""
    module = f"{__package__}.planned_epoch"
    command = [sys.executable, "-m", module, what, kind, str(num_samples), str(turns)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main(measure, __doc__)
