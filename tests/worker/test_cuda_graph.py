"""Captured steps against eager ones, with a stand-in for CUDA; `test_on_cuda.py` has the rest."""

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD
from flower_blsgd.grids.array_records import view_record
from flower_blsgd.tasks.images import random_crop_and_flip
from flower_blsgd.worker import cuda_graph
from flower_blsgd.worker.cuda_graph import capture_for
from flower_blsgd.worker.model_io import state_record

from .helpers import (
    SIZE,
    STEPS,
    StandInCapture,
    capture_on_cpu,
    close,
    closely,
    data,
    eager_and_graphed,
    independent_model,
    independent_order,
    order_of,
    same,
    small_model,
    warnings_in,
)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> StandInCapture:
    capture = StandInCapture()
    capture_on_cpu(monkeypatch, capture)
    return capture


# --- equal to eager


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"augment": random_crop_and_flip, "momentum": 0.0},
        {"channels_last": True},
        {"micro_batch_size": 3, "clip_norm": 0.1},
    ],
    ids=["nesterov", "adamw", "augmented with dropout", "channels last", "micro-batches, clipped"],
)
def test_equals_eager(
    capture: StandInCapture, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Two nodes take turns, each with momentum of its own; then zero, and the server's."""
    # A step draws from the CPU's generator here, which a step on CUDA would not touch.
    monkeypatch.setattr(cuda_graph, "host_randomness", lambda: ())
    model = functools.partial(independent_model, dropout="augment" in settings)
    eager, graphed = eager_and_graphed(model, **settings)
    states = [RecordDict(), RecordDict()], [RecordDict(), RecordDict()]
    policies = ["keep", "keep", "keep", "reset", "average", "average"]
    momentum: ArrayRecord | None = None
    for server_round, policy in enumerate(policies, start=1):  # each has a learning rate and model
        order = independent_order(server_round, momentum_policy=policy, momentum=momentum)
        ours, expected = (
            sgd.run(order, nodes[server_round % 2])
            for sgd, nodes in zip((graphed, eager), states, strict=True)
        )
        # AdamW's learning rate in a tensor is float32.
        assert (close if "optimizer" in settings else same)(ours, expected)
        if policy == "average":
            assert ours.momentum is not None
            assert expected.momentum is not None
            assert closely(ours.momentum, expected.momentum)
            momentum = view_record({n: a.numpy() / 2 for n, a in expected.momentum.items()})
            for name in [name for name in momentum if "6.weight" in name]:
                del momentum[name]  # what it lacks begins with zero
    assert capture.replays == [len(policies) * STEPS]
    for one, other in zip(*states, strict=True):
        assert one.array_records.keys() == other.array_records.keys()
        for name, record in one.array_records.items():
            assert closely(record, other.array_records[name])


def test_batch_sizes_have_a_graph_each_and_those_used_longest_ago_are_forgotten(
    capture: StandInCapture,
) -> None:
    eager, graphed = eager_and_graphed(small_model)
    for server_round, size in enumerate((4, 6, 4, 6, 2), start=1):
        order = order_of(server_round, batch_size=size)
        assert same(graphed.run(order), eager.run(order))
    assert capture.replays == [2 * STEPS, 2 * STEPS, STEPS]
    for size in (3, 5, 7, 8, 9, 2, 10):  # eight stay: 4 goes
        graphed.run(order_of(1, batch_size=size))
    sizes = [size for size, _ in graphed._graphs._captured]  # type: ignore[attr-defined]
    assert sizes == [6, 3, 5, 7, 8, 9, 2, 10]
    order = order_of(2, batch_size=4, momentum_policy="reset")
    assert same(graphed.run(order), eager.run(order))
    assert len(capture.graphs) == 10


def test_weights_have_a_graph_of_their_own_and_are_those_of_each_step(
    capture: StandInCapture,
) -> None:
    eager, graphed = eager_and_graphed(small_model)
    for server_round in (1, 2, 3):
        weights = np.random.default_rng(server_round).random(STEPS * SIZE).astype(np.float32)
        for sample_weights in (weights, None, weights[::-1].copy()):
            order = order_of(server_round, sample_weights=sample_weights)
            assert same(graphed.run(order), eager.run(order))
    assert capture.replays == [6 * STEPS, 3 * STEPS]


# --- what cannot be captured


class RefusingCapture(StandInCapture):
    """As CUDA does with a step that it cannot capture."""

    def graph(self, body: Any, optimizer: torch.optim.Optimizer) -> Any:
        super().graph(body, optimizer)
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_what_cannot_be_captured_is_done_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capture = RefusingCapture()
    capture_on_cpu(monkeypatch, capture)
    eager, graphed = eager_and_graphed(small_model, name="gpu-7")
    for server_round in (1, 2):
        order = order_of(server_round)
        assert same(graphed.run(order), eager.run(order))
    assert len(capture.graphs) == 1
    assert capture.warm_up_steps == 3  # once
    assert warnings_in(caplog) == [
        "worker gpu-7: a step cannot be captured as a CUDA graph; running eagerly: "
        "RuntimeError: operation not permitted when stream is capturing"
    ]


class Averages(nn.Module):
    """Keeps a moving average, in a new tensor after each step unless it is `in_place`."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.inner = small_model()
        self.in_place = in_place
        self.register_buffer("average", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        average = 0.9 * self.average + 0.1 * outputs.detach().mean(dim=0)
        if self.in_place:
            self.average.copy_(average)
        else:
            self.average = average
        return outputs - self.average


@pytest.mark.parametrize("in_place", [False, True])
def test_new_tensor_in_the_place_of_a_buffer_is_not_captured(
    capture: StandInCapture, caplog: pytest.LogCaptureFixture, in_place: bool
) -> None:
    eager, graphed = eager_and_graphed(functools.partial(Averages, in_place))
    arrays = state_record(eager.model)
    for server_round in (1, 2):
        order = order_of(server_round, arrays=arrays)
        assert same(graphed.run(order), eager.run(order))
    assert len(capture.graphs) == in_place
    lines = warnings_in(caplog)
    assert len(lines) == (not in_place)
    assert all(line.endswith("replaces a buffer by a new tensor") for line in lines)


def test_random_numbers_of_the_host_are_not_captured(
    capture: StandInCapture, caplog: pytest.LogCaptureFixture
) -> None:
    class SometimesSkips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.inner(inputs)
            return outputs if random.random() < 0.5 else outputs * 0.5

    sgd = LocalSGD(SometimesSkips(), data(), cuda_graph=True)
    sgd.run(order_of(1, arrays=state_record(sgd.model)))
    assert capture.graphs == []
    (line,) = warnings_in(caplog)
    assert line.endswith("RuntimeError: it draws random numbers on the host")


@pytest.mark.parametrize(("on_device", "fused"), [(False, True), (True, False)])
def test_what_is_never_captured_is_logged(
    caplog: pytest.LogCaptureFixture, on_device: bool, fused: bool
) -> None:
    assert capture_for(torch.device("cuda:1"), on_device, fused, "fast-0") is None
    (line,) = warnings_in(caplog)
    assert line.startswith("worker fast-0: steps are not captured as a CUDA graph: ")
    assert "cuda-graph = false" in line
    assert capture_for(torch.device("cpu"), on_device, fused, "fast-0") is None
    assert len(warnings_in(caplog)) == 1
