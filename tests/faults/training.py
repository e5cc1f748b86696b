"""Training runs with faults, in this process, and what they leave behind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from flower_blsgd.config import RunConfig
from flower_blsgd.engines.local.fork_server import start_fork_server
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.parts import make_local_grid
from flower_blsgd.results.progress import ProgressView
from flower_blsgd.run import train_on
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.round_metrics import RoundRecord
from flower_blsgd.worker import MODULES

from ..grids.processes import Held, left_behind
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
        view = ProgressView(
            Budget.of_run(config),
            Console(quiet=True),
            on_round_end=lambda record: on_round and on_round(record, grid),
        )
        return train_on(grid, config, view).summary


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    start_fork_server(MODULES)  # which stays
    before = Held()
    yield
    if more := left_behind(before):
        raise AssertionError(f"left behind: {more}")
