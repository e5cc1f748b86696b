"""Seconds per step: what is counted, and that nothing of it reaches training."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from flower_blsgd.protocol import TrainOrder
from flower_blsgd.worker import local_sgd, slowdown
from flower_blsgd.worker.calibration import seconds_per_step
from flower_blsgd.worker.local_sgd import LocalSGD

from ..in_process_grid import same_bits

NUM_SAMPLES = 20


class FakeTime:
    """A clock that only sleep moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    for module in (local_sgd, slowdown):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Tired(nn.Module):
    """Sleeps in every forward pass, longest in the first, and counts them."""

    def __init__(self, seconds: float, first_seconds: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.seconds = seconds
        self.first_seconds = first_seconds
        self.sizes: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        local_sgd.time.sleep(self.seconds if self.sizes else self.seconds + self.first_seconds)
        self.sizes.append(len(inputs))
        outputs: Tensor = self.layers(inputs)
        return outputs


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_SAMPLES, 3, generator=generator), torch.arange(NUM_SAMPLES) % 4


def sgd_of(seconds: float = 0.0, first_seconds: float = 0.0, **arguments: Any) -> LocalSGD:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tired(seconds, first_seconds)
    return LocalSGD(model, data(), momentum=0.9, **arguments)


def test_figure_is_the_time_of_a_step_without_the_first(clock: FakeTime) -> None:
    sgd = sgd_of(0.01, first_seconds=0.3)
    assert seconds_per_step(sgd, 4, NUM_SAMPLES, seconds=0.3) == pytest.approx(0.01)
    # 1 to warm up, 3 to look, 3 orders of 0.1 s: 10 steps each.
    assert len(sgd.model.sizes) == 1 + 3 + 3 * 10
    assert set(sgd.model.sizes) == {4}


def test_slow_steps_are_measured_three_times_and_no_more(clock: FakeTime) -> None:
    sgd = sgd_of(0.05)
    assert seconds_per_step(sgd, 4, NUM_SAMPLES, seconds=0.1) == pytest.approx(0.05)
    assert len(sgd.model.sizes) == 4


def test_slowdown_counts_once(clock: FakeTime) -> None:
    sgd = sgd_of(0.01, slowdown=3.0)
    found = seconds_per_step(sgd, 4, NUM_SAMPLES, seconds=0.3)
    assert found == pytest.approx(0.03)  # twice would be 0.09


def test_batch_larger_than_the_data_is_drawn_with_repetition() -> None:
    sgd = sgd_of()
    seconds_per_step(sgd, 50, NUM_SAMPLES, seconds=0.01)
    assert set(sgd.model.sizes) == {50}


def order_of(sgd: LocalSGD, server_round: int) -> TrainOrder:
    start = sgd_of().model
    return TrainOrder(
        round=server_round,
        epoch=1,
        local_steps=3,
        batch_size=4,
        learning_rate=0.1,
        seed=server_round,
        deadline_seconds=0.0,
        momentum_policy="keep",
        indices=np.arange(12, dtype=np.int32),
        arrays=ArrayRecord(start.state_dict()),
    )


@pytest.mark.parametrize("with_state", [True, False])
def test_training_after_it_gives_the_same_bits(with_state: bool) -> None:
    models = []
    for calibrate in (False, True):
        sgd = sgd_of()
        state = RecordDict() if with_state else None
        if calibrate:
            seconds_per_step(sgd, 4, NUM_SAMPLES, seconds=0.02)
        reports = [sgd.run(order_of(sgd, n), state) for n in (1, 2)]
        models.append(reports[-1].arrays)
    assert same_bits(*models)


def test_training_around_it_gives_the_same_bits_where_momentum_is_in_a_state() -> None:
    models = []
    for calibrate in (False, True):
        sgd, state = sgd_of(), RecordDict()
        sgd.run(order_of(sgd, 1), state)
        if calibrate:
            seconds_per_step(sgd, 4, NUM_SAMPLES, seconds=0.02)
        models.append(sgd.run(order_of(sgd, 2), state).arrays)
    assert same_bits(*models)


def test_weights_and_random_numbers_are_as_before() -> None:
    sgd = sgd_of(weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in sgd.model.named_parameters()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    seconds_per_step(sgd, 4, NUM_SAMPLES, seconds=0.02)
    assert torch.equal(torch.rand(1), expected)
    for name, parameter in sgd.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
