"""Training runs with faults, in this process, and what they leave behind."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from flower_blsgd.config import RunConfig
from flower_blsgd.grids.fork_server import start_fork_server
from flower_blsgd.grids.local_grid import LocalGrid
from flower_blsgd.results.metrics import RunMetrics
from flower_blsgd.results.progress import ProgressView
from flower_blsgd.run import make_local_grid, train_on
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.round_metrics import RoundRecord
from flower_blsgd.worker import MODULES

from ..grids.processes import processes_below, wait_until
from .faults import Faults, short_patience

WORKERS = "2x cpu:0 fast; 1x cpu:1 slow"
"""Two cores are enough, and with three workers a round does not depend on one of them."""

SETTINGS: dict[str, Any] = {
    "epochs": 6,
    "local-steps-fast": 4,
    "local-steps-slow": 2,
    "threads": 1,
    "workers": WORKERS,
    "evaluate-every-epochs": 3,
}
"""Digits to 98 % in 53 rounds: a few seconds."""

ROUNDS = 53
PATIENCE_SECONDS = 3.0


OnRound = Callable[[RoundRecord, LocalGrid], object]


class _View(ProgressView):
    """Shows nothing, and calls back after every round."""

    def __init__(self, config: RunConfig, grid: LocalGrid, on_round: OnRound | None) -> None:
        super().__init__(Budget.of_run(config), Console(quiet=True))
        self._grid, self._on_round = grid, on_round

    def round(self, record: RoundRecord, metrics: RunMetrics) -> None:
        super().round(record, metrics)
        if self._on_round is not None:
            self._on_round(record, self._grid)


def train(
    folder: Path,
    faults: Faults | None = None,
    patience: float = PATIENCE_SECONDS,
    on_round: OnRound | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train on digits with real worker processes; keys with an underscore for a dash.

    Returns the summary.
    """
    given = {key.replace("_", "-"): value for key, value in settings.items()}
    config = RunConfig.from_run_config({**SETTINGS, "out": str(folder), **given})
    with short_patience(patience), make_local_grid(config, setup=faults) as grid:
        return train_on(grid, config, _View(config, grid, on_round)).summary


@dataclass
class Held:
    """What this process holds: processes below it, threads, descriptors, blocks of memory."""

    processes: set[int] = field(default_factory=processes_below)
    threads: int = field(default_factory=threading.active_count)
    descriptors: int = field(default_factory=lambda: len(descriptors()))
    shared: int = field(default_factory=lambda: sum("memfd:" in d for d in descriptors()))

    def more_than(self, before: "Held") -> dict[str, int]:
        """Return what is held now and was not before."""
        more = {
            "processes": len(self.processes - before.processes),
            "threads": self.threads - before.threads,
            "descriptors": self.descriptors - before.descriptors,
            "shared memory": self.shared - before.shared,
        }
        return {name: count for name, count in more.items() if count > 0}


def descriptors() -> list[str]:
    """Return where the open descriptors of this process lead to, but for a library's own files."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of this very listing
            continue
    return [path for path in found if "site-packages" not in path]  # fonts stay open


def left_behind(before: Held) -> dict[str, int]:
    """Return what is held longer than it takes to end; empty if nothing is."""

    def nothing() -> bool:
        gc.collect()
        return not Held().more_than(before)

    wait_until(nothing, 30.0)
    return Held().more_than(before)


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    start_fork_server(MODULES)  # which stays
    before = Held()
    yield
    if more := left_behind(before):
        raise AssertionError(f"left behind: {more}")
