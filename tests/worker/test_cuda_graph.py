"""Recorded steps against eager ones, with a stand-in for CUDA; `test_on_cuda.py` has the rest."""

import dataclasses
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn
from torch.utils.data import Dataset

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.array_view import view_record
from flower_blsgd.tasks.augmentation import random_crop_and_flip
from flower_blsgd.worker.calibration import seconds_per_step
from flower_blsgd.worker.local_sgd import cross_entropy
from flower_blsgd.worker.model_state import state_record

from .stand_in import StandInCapture, draw_as_cuda_does, record_on_cpu, small_model

NUM_SAMPLES, SIZE, STEPS = 40, 4, 3


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_SAMPLES, 3, 6, 6, generator=generator), torch.arange(NUM_SAMPLES) % 4


def order_of(server_round: int, **changes: Any) -> TrainOrder:
    size = changes.get("batch_size", SIZE)
    steps = changes.get("local_steps", STEPS)
    draw = np.random.default_rng(server_round)
    order = TrainOrder(
        round=server_round,
        epoch=1,
        local_steps=steps,
        batch_size=size,
        learning_rate=0.02 / server_round,
        seed=server_round,
        deadline_seconds=0.0,
        momentum_policy="keep",
        indices=draw.integers(0, NUM_SAMPLES, steps * size, dtype=np.int32),
        arrays=state_record(small_model()),
    )
    return dataclasses.replace(order, **changes)


def same_bits(one: ArrayRecord, other: ArrayRecord) -> bool:
    return set(one) == set(other) and all(
        one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one
    )


def same(one: TrainReport, other: TrainReport) -> bool:
    return (
        one.completed_steps == other.completed_steps
        and one.losses.tobytes() == other.losses.tobytes()
        and same_bits(one.arrays, other.arrays)
    )


def close(one: TrainReport, other: TrainReport) -> bool:
    """Return whether they agree to rounding: a learning rate in a tensor is float32."""
    return np.allclose(one.losses, other.losses, rtol=1e-5) and closely(one.arrays, other.arrays)


def closely(one: ArrayRecord, other: ArrayRecord) -> bool:
    return set(one) == set(other) and all(
        np.allclose(one[name].numpy(), other[name].numpy(), rtol=1e-5, atol=1e-6) for name in one
    )


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> StandInCapture:
    capture = StandInCapture()
    record_on_cpu(monkeypatch, capture)
    return capture


def eager_and_graphed(**settings: Any) -> tuple[LocalSGD, LocalSGD]:
    """Return two of a kind; a capture must be in place."""
    dropout = settings.pop("dropout", False)
    return tuple(  # type: ignore[return-value]
        LocalSGD(small_model(dropout), data(), cuda_graph=cuda_graph, **settings)
        for cuda_graph in (False, True)
    )


# --- equal to eager


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.0},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"augment": random_crop_and_flip},
        {"channels_last": True},
    ],
    ids=["plain", "momentum", "nesterov", "augmented", "channels last"],
)
@pytest.mark.parametrize("policy", ["keep", "reset"])
def test_equals_eager(capture: StandInCapture, settings: dict[str, Any], policy: str) -> None:
    eager, graphed = eager_and_graphed(**settings)
    for server_round in (1, 2, 3):  # each with its own learning rate and model
        order = order_of(server_round, momentum_policy=policy)
        assert same(graphed.run(order), eager.run(order))
    assert capture.replays == [3 * STEPS]


def test_adamw_agrees_with_eager(capture: StandInCapture) -> None:
    eager, graphed = eager_and_graphed(optimizer="adamw", weight_decay=0.1)
    for server_round in (1, 2, 3):
        order = order_of(server_round)
        assert close(graphed.run(order), eager.run(order))
    assert capture.replays == [3 * STEPS]


def test_equals_eager_with_dropout(
    capture: StandInCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_as_cuda_does(monkeypatch)
    eager, graphed = eager_and_graphed(dropout=True, augment=random_crop_and_flip)
    for server_round in (1, 2, 1):
        order = order_of(server_round)
        assert same(graphed.run(order), eager.run(order))
    assert capture.replays == [3 * STEPS]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_momentum_of_the_server_is_copied_to_where_the_graph_reads_it(
    capture: StandInCapture, optimizer: str
) -> None:
    eager, graphed = eager_and_graphed(optimizer=optimizer)
    momentum: ArrayRecord | None = None
    for server_round in (1, 2, 3):
        order = order_of(server_round, momentum_policy="average", momentum=momentum)
        ours, expected = graphed.run(order), eager.run(order)
        assert close(ours, expected)
        assert ours.momentum is not None
        assert expected.momentum is not None
        assert closely(ours.momentum, expected.momentum)
        momentum = view_record({n: a.numpy() / 2 for n, a in expected.momentum.items()})
        if server_round == 1:  # what it lacks begins with zero
            for name in [name for name in momentum if "6.weight" in name]:
                del momentum[name]
    assert capture.replays == [3 * STEPS]


def test_momentum_in_a_state_is_that_of_its_node(capture: StandInCapture) -> None:
    eager, graphed = eager_and_graphed()
    states = {"eager": [RecordDict(), RecordDict()], "graphed": [RecordDict(), RecordDict()]}
    for server_round, node in ((1, 0), (2, 1), (3, 0), (4, 1)):
        order = order_of(server_round)
        ours = graphed.run(order, states["graphed"][node])
        assert same(ours, eager.run(order, states["eager"][node]))
    for one, other in zip(states["eager"], states["graphed"], strict=True):
        assert same_bits(one.array_records["momentum"], other.array_records["momentum"])


def test_batch_sizes_have_a_graph_each(capture: StandInCapture) -> None:
    eager, graphed = eager_and_graphed()
    for server_round, size in enumerate((4, 6, 4, 6, 2), start=1):
        order = order_of(server_round, batch_size=size)
        assert same(graphed.run(order), eager.run(order))
    assert capture.replays == [2 * STEPS, 2 * STEPS, STEPS]


def test_batch_sizes_used_longest_ago_are_forgotten(capture: StandInCapture) -> None:
    eager, graphed = eager_and_graphed()
    for size in (*range(2, 10), 2, 10):  # eight stay: 3 goes
        graphed.run(order_of(1, batch_size=size))
    assert graphed._steps.batch_sizes == (4, 5, 6, 7, 8, 9, 2, 10)  # type: ignore[attr-defined]
    order = order_of(2, batch_size=3)
    eager.run(order_of(1, batch_size=10))
    assert same(
        graphed.run(dataclasses.replace(order, momentum_policy="reset")),
        eager.run(dataclasses.replace(order, momentum_policy="reset")),
    )
    assert len(capture.recordings) == 10


def test_deadline_is_kept(capture: StandInCapture) -> None:
    eager, graphed = eager_and_graphed()
    order = order_of(1, deadline_seconds=1e-9)
    ours = graphed.run(order)
    assert ours.completed_steps == 1
    assert same(ours, eager.run(order))


def test_slowdown_is_kept(capture: StandInCapture) -> None:
    graphed = LocalSGD(small_model(), data(), slowdown=3.0)
    graphed.run(order_of(1))
    steps = graphed.run(order_of(2))
    assert steps.compute_seconds >= 3 * STEPS * graphed._slowdown.best_step_seconds * 0.999


def test_calibration_leaves_the_graph_in_use(capture: StandInCapture) -> None:
    eager, graphed = eager_and_graphed()
    seconds_per_step(graphed, SIZE, NUM_SAMPLES, seconds=0.01)
    assert same(graphed.run(order_of(1)), eager.run(order_of(1)))
    assert len(capture.recordings) == 1


# --- no trace


def test_recording_leaves_no_trace(capture: StandInCapture) -> None:
    graphed = LocalSGD(small_model(), data(), momentum=0.9)
    graphed.run(order_of(1))
    kept = graphed._optimizer.state[next(graphed.model.parameters())]["momentum_buffer"]
    before = [tensor.clone() for tensor in (*graphed.model.state_dict().values(), kept)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.random(), torch.rand(1)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    graphed._steps.prepare(torch.arange(6))  # another batch size
    assert len(capture.recordings) == 2
    assert (random.random(), np.random.random(), torch.rand(1)) == expected
    after = [*graphed.model.state_dict().values(), kept]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_order_that_fails_leaves_zeros_where_the_graph_reads_them(capture: StandInCapture) -> None:
    burning = False

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if burning:
            raise RuntimeError("the fan stands still")
        return cross_entropy(outputs, targets)

    graphed = LocalSGD(small_model(), data(), loss)
    first = graphed.run(order_of(1))
    burning = True
    with pytest.raises(RuntimeError, match="the fan"):
        graphed.run(order_of(2))
    burning = False
    assert same(graphed.run(order_of(1)), first)


# --- what cannot be recorded


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


class RefusingCapture(StandInCapture):
    """As CUDA does with a step that reads a number out of a tensor."""

    def record(self, body: Any, optimizer: torch.optim.Optimizer) -> Any:
        super().record(body, optimizer)
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_what_cannot_be_recorded_is_done_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record_on_cpu(monkeypatch, RefusingCapture())
    eager, graphed = eager_and_graphed(name="gpu-7")
    for server_round in (1, 2):
        order = order_of(server_round)
        assert same(graphed.run(order), eager.run(order))
    (line,) = warnings_in(caplog)
    assert line == (
        "worker gpu-7: a step cannot be recorded as a CUDA graph, it goes on without: "
        "RuntimeError: operation not permitted when stream is capturing"
    )


class WaitingCapture(StandInCapture):
    """As torch does with such a step where it is told to raise."""

    def check(self, body: Any) -> None:
        super().check(body)
        raise RuntimeError("called a synchronizing CUDA operation")


def test_step_that_waits_for_the_device_is_not_even_tried_to_be_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capture = WaitingCapture()
    record_on_cpu(monkeypatch, capture)
    eager, graphed = eager_and_graphed()
    for server_round in (1, 2):
        order = order_of(server_round)
        assert same(graphed.run(order), eager.run(order))
    assert capture.recordings == []
    assert capture.warm_up_steps == 3
    (line,) = warnings_in(caplog)
    assert line.endswith("RuntimeError: called a synchronizing CUDA operation")


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
def test_new_tensor_in_the_place_of_a_buffer_is_not_recorded(
    capture: StandInCapture, caplog: pytest.LogCaptureFixture, in_place: bool
) -> None:
    eager, graphed = (
        LocalSGD(Averages(in_place), data(), cuda_graph=cuda_graph) for cuda_graph in (False, True)
    )
    arrays = state_record(eager.model)
    for server_round in (1, 2):
        order = order_of(server_round, arrays=arrays)
        assert same(graphed.run(order), eager.run(order))
    assert len(capture.recordings) == in_place
    lines = warnings_in(caplog)
    assert len(lines) == (not in_place)
    assert all(line.endswith("puts a new tensor in the place of a buffer") for line in lines)


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: float(torch.rand(()))])
def test_random_numbers_of_the_host_are_not_recorded(
    capture: StandInCapture, caplog: pytest.LogCaptureFixture, draw: Any
) -> None:
    class SometimesSkips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.inner(inputs)
            return outputs if draw() < 0.5 else outputs * 0.5

    sgd = LocalSGD(SometimesSkips(), data())
    sgd.run(order_of(1, arrays=state_record(sgd.model)))
    assert capture.recordings == []
    (line,) = warnings_in(caplog)
    assert line.endswith("RuntimeError: it draws random numbers on the host")


def test_data_that_the_host_makes_are_not_recorded(
    capture: StandInCapture, caplog: pytest.LogCaptureFixture
) -> None:
    class Pairs(Dataset):
        def __len__(self) -> int:
            return NUM_SAMPLES

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return data()[0][index], data()[1][index]

    sgd = LocalSGD(small_model(), Pairs())
    eager = LocalSGD(small_model(), data(), cuda_graph=False)
    assert same(sgd.run(order_of(1)), eager.run(order_of(1)))
    assert capture.recordings == []
    (line,) = warnings_in(caplog)
    assert "the host makes every batch" in line


def test_mistake_in_the_model_is_told_as_ever(
    capture: StandInCapture, caplog: pytest.LogCaptureFixture
) -> None:
    sgd = LocalSGD(small_model(), data(), lambda outputs, targets: outputs.mean())
    with pytest.raises(ValueError, match='reduction="none"'):
        sgd.run(order_of(1))
    assert warnings_in(caplog) == []


def test_without_the_setting_nothing_is_recorded(capture: StandInCapture) -> None:
    LocalSGD(small_model(), data(), cuda_graph=False).run(order_of(1))
    assert capture.warm_up_steps == 0


def test_a_cpu_records_nothing() -> None:
    sgd = LocalSGD(small_model(), data())
    assert sgd._path.capture is None
    assert sgd._path.learning_rate == 1.0
    assert not sgd._path.state_stays
