"""Who evaluates in a run: what the setting means here, and a real process aside."""

import contextlib
import csv
import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord

from flower_blsgd import run_evaluation as run_evaluation_module
from flower_blsgd.config import RunConfig
from flower_blsgd.own_grid import own_grid
from flower_blsgd.results.report import RunReport
from flower_blsgd.roster import Roster
from flower_blsgd.run import train_on
from flower_blsgd.run_evaluation import _place, run_evaluation
from flower_blsgd.runtime.devices import parse_workers
from flower_blsgd.runtime.flower_internals import TaskIdentity, identity_kept
from flower_blsgd.runtime.local_grid import LocalGrid
from flower_blsgd.runtime.machine import Machine, usable_cores
from flower_blsgd.tasks import load_task

from .in_process_grid import InProcessGrid
from .log_capture import captured_log

CORES = usable_cores()
TWO = Machine((0, 1), ())
CONFIG = RunConfig(
    epochs=3,
    local_steps_fast=8,
    threads=1,
    model="cnn-batchnorm",
    sampler="uniform",
    momentum_buffers="reset",
)
ONE_CORE = f"1x cpu:{CORES[0]} fast; 1x cpu:{CORES[0]} slow"


def place_of(where: str, machine: Machine, workers: str | None, **settings: Any) -> str:
    """Return the device that evaluates aside, with a mark if it is shared; empty if none does."""
    task = load_task("digits")
    config = dataclasses.replace(CONFIG, evaluate_on=where, **settings)
    grid: Any = InProcessGrid({})
    if workers is not None:
        grid = LocalGrid(parse_workers(workers, machine), "nothing:app", Path(), {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_evaluation_module, "this_machine", lambda: machine)
        place = _place(grid, config, task)
    if place is None:
        return ""
    return place.worker.device_with_cores + (" shared" if place.shared else "")


@pytest.mark.parametrize("workers", ["1x cpu:0 fast; 1x cpu:1 slow", "auto"])
def test_auto_on_two_cores_is_workers(workers: str) -> None:
    assert place_of("auto", TWO, workers) == ""


def test_auto_is_aside_where_a_core_is_idle() -> None:
    assert place_of("auto", TWO, "1x cpu:0 fast; 1x cpu:0 slow") == "cpu:1"
    assert place_of("auto", Machine((0, 1, 2, 3), ()), "1x cpu:0 fast; 1x cpu:1 slow") == "cpu:3"


def test_auto_on_grids_of_flower_is_workers() -> None:
    assert place_of("auto", Machine((0, 1, 2, 3), ("cuda:0",)), None) == ""


def test_aside_finds_a_place_everywhere() -> None:
    assert place_of("aside", TWO, "1x cpu:0 fast; 1x cpu:1 slow") == "cpu:0-1 shared"
    assert place_of("aside", TWO, "1x cpu:0 fast") == "cpu:1"
    assert place_of("aside", TWO, None) == "cpu:0-1 shared"
    assert place_of("aside", Machine((0, 1), ("cuda:0",)), None) == "cuda:0 shared"


@pytest.mark.parametrize("where", ["workers", "server"])
def test_others_are_never_aside(where: str) -> None:
    assert place_of(where, Machine((0, 1, 2, 3), ("cuda:0",)), "1x cpu:0 fast") == ""


def test_identity_is_kept_when_a_grid_is_made() -> None:
    before = TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id
    try:
        TaskIdentity.run_id = 77
        with identity_kept():
            LocalGrid(parse_workers("1x cpu", TWO), "nothing:app", Path(), {})
            assert TaskIdentity.run_id == 1
        assert TaskIdentity.run_id == 77
    finally:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = before


def test_the_server_evaluates_as_precisely_as_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []
    sums = run_evaluation_module.evaluate_sums

    def noted(*arguments: Any) -> Any:
        seen.append("evaluates")
        return sums(*arguments)

    monkeypatch.setattr(run_evaluation_module, "this_machine", lambda: TWO)
    monkeypatch.setattr(run_evaluation_module, "use_precision", lambda *told: seen.append(told))
    monkeypatch.setattr(run_evaluation_module, "evaluate_sums", noted)
    task = load_task("digits")
    config = dataclasses.replace(CONFIG, precision="tf32", evaluate_on="server")
    roster, arrays = Roster(1), ArrayRecord(task.initial_model(0).state_dict())
    grid: Any = InProcessGrid({})
    with run_evaluation(grid, config, task, roster, arrays, lambda seconds: None) as evaluation:
        evaluation(1, arrays)
    assert seen == [("tf32", "cpu"), "evaluates"]


# --- real processes


def run_with(where: str, workers: str = ONE_CORE, **settings: Any) -> RunReport:
    config = dataclasses.replace(CONFIG, evaluate_on=where, workers=workers, **settings)
    with own_grid(config) as grid:
        return train_on(grid, config)


def epochs_of(report: RunReport) -> list[tuple[int, float, float]]:
    with (report.folder.path / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [(int(r["epoch"]), float(r["accuracy"]), float(r["loss"])) for r in rows]


def model_of(report: RunReport) -> bytes:
    return (report.folder.path / "model.safetensors").read_bytes()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def by_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunReport]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("workers"))
        yield run_with("workers")


@pytest.mark.processes
def test_process_aside_says_of_each_epoch_what_the_workers_say(
    by_workers: RunReport, capsys: pytest.CaptureFixture[str]
) -> None:
    with captured_log() as log:
        aside = run_with("aside")
    assert log.warnings == []
    assert model_of(aside) == model_of(by_workers)
    expected, found = epochs_of(by_workers), epochs_of(aside)
    assert [row[0] for row in found] == [1, 2, 3]
    for (_, accuracy, loss), (_, its_accuracy, its_loss) in zip(expected, found, strict=True):
        assert its_accuracy == pytest.approx(accuracy, abs=1e-6)
        assert its_loss == pytest.approx(loss, abs=1e-6)
    assert aside.summary["accuracy"] == found[-1][1]
    assert aside.summary["best_accuracy"] == max(row[1] for row in found)
    assert aside.summary.keys() == by_workers.summary.keys()
    told = capsys.readouterr().out
    assert "evaluation aside" in told
    assert ("warning" in told) is (len(CORES) == 1)


@pytest.mark.processes
def test_process_aside_that_is_killed_is_replaced_by_the_server(
    by_workers: RunReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process of it is killed, again and again; the run, its model and figures are whole."""
    grids: list[LocalGrid] = []
    stop = threading.Event()

    def noted(*arguments: Any) -> LocalGrid:
        grids.append(own_grid(*arguments))
        return grids[-1]

    def kill_all() -> None:
        while not stop.wait(0.02):
            for grid in list(grids):
                for process in grid.process_ids.values():
                    with contextlib.suppress(ProcessLookupError):  # it has ended just now
                        os.kill(process, signal.SIGKILL)

    monkeypatch.setattr(run_evaluation_module, "own_grid", noted)
    killer = threading.Thread(target=kill_all, daemon=True)
    killer.start()
    try:
        with captured_log() as log:
            report = run_with("aside")
    finally:
        stop.set()
        killer.join(60)
    assert model_of(report) == model_of(by_workers)
    assert [row[0] for row in epochs_of(report)] == [1, 2, 3]
    for (_, accuracy, loss), (_, its_accuracy, its_loss) in zip(
        epochs_of(by_workers), epochs_of(report), strict=True
    ):
        assert its_accuracy == pytest.approx(accuracy, abs=1e-6)
        assert its_loss == pytest.approx(loss, abs=1e-6)
    warned = [line for line in log.warnings if "did not evaluate after round" in line]
    assert 1 <= len(warned) <= 3  # given up after three deaths, which is told once
    assert all("evaluation (cpu:" in line for line in warned)
