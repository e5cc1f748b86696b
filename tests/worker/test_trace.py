"""The profiler's trace of one round of a worker; `tests/test_task_runs.py` has a whole run."""

import json
from pathlib import Path

import pytest
import torch

from flower_blsgd import LocalSGD
from flower_blsgd.worker.trace import traced

from .helpers import STEPS, data, order_of, same, small_model, warnings_in


def operators(file: Path) -> list[str]:
    return [event["name"] for event in json.loads(file.read_text())["traceEvents"]]


def test_trace_of_the_second_round_is_written_once_and_changes_no_bit(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    plain, observed = (LocalSGD(small_model(), data()) for _ in range(2))
    for server_round, what in ((1, torch.add), (2, torch.sub), (3, torch.mul)):
        with traced(folder / "worker-1.json", server_round) as is_traced:
            found = observed.run(order_of(server_round))
            what(torch.ones(2), 1.0)
        assert is_traced == (server_round == 2)
        assert same(found, plain.run(order_of(server_round)))
        assert folder.exists() == (server_round > 1)
    assert [path.name for path in folder.iterdir()] == ["worker-1.json"]
    names = operators(folder / "worker-1.json")
    assert "aten::sub" in names
    assert names.count("Optimizer.step#SGD.step") == STEPS


def test_trace_that_cannot_be_written_costs_one_line_and_an_order_that_fails_leaves_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").touch()
    with traced(tmp_path / "taken" / "worker-0.json", 2):
        torch.ones(1)
    (line,) = warnings_in(caplog)
    assert line.startswith("no trace of worker-0: ")
    file = tmp_path / "worker-0.json"
    with pytest.raises(ZeroDivisionError), traced(file, 2):
        raise ZeroDivisionError
    assert not file.exists()
    with traced(file, 2):  # the profiler can be used again
        torch.ones(1)
    assert "aten::ones" in operators(file)
