"""The server evaluates as precisely as the workers."""

import dataclasses
from typing import Any

import pytest
from flwr.app import ArrayRecord

from flower_blsgd import run_evaluation as run_evaluation_module
from flower_blsgd.config import RunConfig
from flower_blsgd.roster import Roster
from flower_blsgd.run_evaluation import run_evaluation
from flower_blsgd.runtime.machine import Machine
from flower_blsgd.tasks import load_task

from .in_process_grid import InProcessGrid


def test_the_server_evaluates_as_precisely_as_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []
    sums = run_evaluation_module.evaluate_sums

    def noted(*arguments: Any) -> Any:
        seen.append("evaluates")
        return sums(*arguments)

    monkeypatch.setattr(run_evaluation_module, "this_machine", lambda: Machine((0, 1), ()))
    monkeypatch.setattr(run_evaluation_module, "use_precision", lambda *told: seen.append(told))
    monkeypatch.setattr(run_evaluation_module, "evaluate_sums", noted)
    task = load_task("digits")
    config = dataclasses.replace(RunConfig(), precision="tf32", evaluate_on="server")
    arrays = ArrayRecord(task.initial_model(0).state_dict())
    run_evaluation(InProcessGrid({}), config, task, Roster(1), lambda seconds: None)(1, arrays)
    assert seen == [("tf32", "cpu"), "evaluates"]
