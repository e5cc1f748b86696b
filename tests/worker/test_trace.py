"""What `blsgd run --trace` leaves: torch's profiler trace of one round of every worker."""

import json
from pathlib import Path

import pytest
import torch

from flower_blsgd import LocalSGD
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.worker.trace import traced

from ..command import Command
from .helpers import STEPS, data, order_of, same, small_model, warnings_in

FIRST, LAST = usable_cores()[0], usable_cores()[-1]
SETTINGS = (
    "epochs=1 local-steps-fast=16 local-steps-slow=4 batch-size=16 threads=1 seed=3 "
    f"workers='1x cpu:{LAST} slow name=tortoise; 1x cpu:{FIRST} fast'"
)
"""(16 + 4) x 16 = 320 of 1,437 samples a round: 4 rounds."""


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


@pytest.mark.processes
def test_traced_run_has_a_file_for_every_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blsgd: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = blsgd("run", "-c", SETTINGS, "--trace", "-s", "out=traced")
    assert f"traces of one round: {tmp_path}/traced/trace (open them in ui.perfetto.dev)" in printed
    files = sorted(Path("traced/trace").iterdir())
    assert [file.name for file in files] == ["worker-0.json", "worker-1.json"]
    steps = [operators(file).count("Optimizer.step#SGD.step") for file in files]
    assert steps == [4, 16]
