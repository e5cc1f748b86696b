"""Runs on the local grid in which one process evaluates while the other trains."""

import csv
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.parts import make_local_grid
from flower_blsgd.results.progress import ProgressView
from flower_blsgd.results.recorder import RunRecorder
from flower_blsgd.run import train_on
from flower_blsgd.strategy.budget import Budget

from .grids.processes import process_ids, wait_until
from .log_capture import captured_log
from .test_run import config_of

CORE = min(usable_cores())
FAST = f"1x cpu:{CORE} fast"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(workers: str, do: Callable[[LocalGrid, int], object] = lambda *_: None) -> RunRecorder:
    config = config_of(sampler="uniform", workers=workers, epochs=3, min_workers=1)
    with make_local_grid(config) as grid:
        view = ProgressView(
            Budget(4), lines=False, on_round_end=lambda record: do(grid, record.round)
        )
        return train_on(grid, config, view)


@functools.cache
def alone() -> RunRecorder:
    """Train without a worker that evaluates, once for all tests."""
    return run(FAST)


def rows_of(report: RunRecorder) -> list[dict[str, str]]:
    return list(csv.DictReader((report.folder.path / "epochs.csv").read_text().splitlines()))


def wait_until_idle(grid: LocalGrid, server_round: int) -> None:
    node = grid._nodes[max(grid._nodes)]
    assert wait_until(lambda: node._waiting.empty() and not node._handled)


def test_evaluated_model_does_not_change_while_the_others_train() -> None:
    """Figures and model have the bits of a run without the worker that evaluates."""
    report = run(f"{FAST}; 1x cpu:{CORE} role=evaluate slowdown=4", wait_until_idle)
    rows, expected = rows_of(report), rows_of(alone())
    measured = ("epoch", "rounds", "accuracy", "loss", "train_loss")
    assert [[row[n] for n in measured] for row in rows] == [
        [row[n] for n in measured] for row in expected
    ]
    late = [int(row["result_rounds"]) - int(row["rounds"]) for row in rows[:-1]]
    assert late == [2, 2]  # one round to evaluate, and one until the workers wait
    assert not rows[-1]["result_rounds"]
    models = [one.folder.path / "model.safetensors" for one in (report, alone())]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert report.summary["best_accuracy"] == alone().summary["best_accuracy"]
    assert report.summary["async_evaluation_seconds"] > 0


def test_process_that_is_killed_while_it_evaluates_costs_one_evaluation_by_the_others() -> None:
    """It is far too slow to answer before it is killed, or before the run ends."""
    killed: list[int] = []

    def kill(grid: LocalGrid, server_round: int) -> None:
        node = grid._nodes[max(grid._nodes)]
        if node._handled and not killed:
            killed.append(server_round)
            os.kill(process_ids(grid)[max(grid._nodes)], signal.SIGKILL)
            assert wait_until(lambda: not node._handled)

    with captured_log() as log:
        report = run(f"{FAST}; 1x cpu:{CORE} role=evaluate slowdown=100000", kill)
    (warning,) = [line for line in log.warnings if "did not evaluate" in line]
    assert warning.startswith("worker evaluate-1 ")
    rows, expected = rows_of(report), rows_of(alone())
    assert rows[0]["result_rounds"] == str(killed[0] + 1)  # when the workers wait
    figures: list[list[Any]] = [[row["accuracy"] for row in of] for of in (rows, expected)]
    assert figures[0] == [figures[1][0], "", figures[1][2]]  # the second is dropped at the end
    assert report.summary["async_evaluation"]["without_result"] == 1
    assert report.summary["failures_by_worker"] == {
        warning.split(" did ")[0][7:]: {"died, evaluating": 1}
    }
