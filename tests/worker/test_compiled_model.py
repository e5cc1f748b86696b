"""A compiled model, and what happens where compiling fails."""

import logging
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flower_blsgd import LocalSGD
from flower_blsgd.worker.model_state import state_record

from .stand_in import StandInCapture, record_on_cpu
from .test_cuda_graph import close, data, order_of, same, small_model


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


class Compiled:
    """What a `torch.compile` that works returns; counts its calls."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.sizes = model, list[int]()

    def __call__(self, inputs: Tensor) -> Any:
        self.sizes.append(len(inputs))
        return self.model(inputs)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    made: list[Compiled] = []

    def compile(model: nn.Module) -> Compiled:
        made.append(Compiled(model))
        return made[-1]

    monkeypatch.setattr(torch, "compile", compile)
    return made


def test_compiled_model_computes_every_step(compiled: list[Compiled]) -> None:
    sgd, plain = LocalSGD(small_model(), data(), compile=True), LocalSGD(small_model(), data())
    for server_round, size in ((1, 4), (2, 4), (3, 6)):
        order = order_of(server_round, batch_size=size)
        assert same(sgd.run(order), plain.run(order))
    assert compiled[0].sizes == [4] * 7 + [6] * 4  # one more each to see whether it works


def test_compiled_model_is_what_is_recorded(
    compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = StandInCapture()
    record_on_cpu(monkeypatch, capture)
    sgd = LocalSGD(small_model(), data(), compile=True)
    plain = LocalSGD(small_model(), data(), cuda_graph=False)
    for server_round in (1, 2):
        assert same(sgd.run(order_of(server_round)), plain.run(order_of(server_round)))
    assert capture.replays == [6]
    assert len(compiled[0].sizes) == 1 + 3 + 1 + 6


@pytest.mark.parametrize("recorded", [False, True])
def test_compiling_that_fails_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recorded: bool
) -> None:
    def fails(inputs: Tensor) -> Any:
        raise RuntimeError("no C++ compiler was found\nSet CXX ...")

    monkeypatch.setattr(torch, "compile", lambda model: fails)
    if recorded:
        record_on_cpu(monkeypatch, StandInCapture())
    sgd = LocalSGD(small_model(), data(), compile=True, name="slow-1")
    plain = LocalSGD(small_model(), data(), cuda_graph=False)
    for server_round in (1, 2):
        assert same(sgd.run(order_of(server_round)), plain.run(order_of(server_round)))
    (line,) = warnings_in(caplog)
    assert line == (
        "worker slow-1: compile = true did not work, it goes on without: "
        "RuntimeError: no C++ compiler was found"
    )


def test_mistake_in_the_model_is_told_as_ever(compiled: list[Compiled]) -> None:
    sgd = LocalSGD(small_model(), data(), lambda outputs, targets: outputs.mean(), compile=True)
    with pytest.raises(ValueError, match='reduction="none"'):
        sgd.run(order_of(1))


@pytest.mark.engines  # a C++ compiler at work: up to a minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # torch's own, of its dependencies
def test_torch_compiles_it(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    order = order_of(1, arrays=state_record(model))
    sgd = LocalSGD(model, data(), compile=True)
    found = sgd.run(order)
    assert warnings_in(caplog) == []
    assert close(found, LocalSGD(model, data()).run(order))
