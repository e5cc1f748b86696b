"""The time of the steps of an order, a slowdown, and the seconds of a step, on a made-up clock."""

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainReport
from flower_blsgd.worker.profile import seconds_per_step

from ..in_process_grid import same_bits
from .test_local_sgd import DATA, PAIR, order_of, squares


class Clock:
    """Time that passes only where the test lets it pass, and a little whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float] = []
        self.share = 1.0  # of the core

    def perf_counter(self) -> float:
        self.now += 1e-5
        return self.now

    def thread_time(self) -> float:
        return self.share * self.now

    def time(self) -> float:
        return 1000.0 + self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.naps.append(seconds)
        self.now += seconds


class TakesOneSecond(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self._clock = clock

    def forward(self, inputs: Tensor) -> Tensor:
        self._clock.now += 1.0
        return inputs @ self.weight


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("flower_blsgd.worker.timing.time", clock)
    return clock


def timed(clock: Clock, steps: int, deadline_seconds: float, slowdown: float = 1.0) -> TrainReport:
    sgd = LocalSGD(TakesOneSecond(clock), DATA, squares, slowdown=slowdown)
    return sgd.run(order_of(PAIR * steps, deadline_seconds=deadline_seconds))


def test_time_of_the_steps_is_reported(clock: Clock) -> None:
    clock.now = 7.0
    report = timed(clock, 3, 0.0)
    assert report.compute_seconds == pytest.approx(3.0, abs=2e-4)
    assert (report.started_at, report.ended_at) == pytest.approx((1007.0, 1010.0), abs=2e-4)
    assert clock.naps == []


@pytest.mark.parametrize(
    ("deadline", "slowdown", "steps"),
    [(0.0, 1, 5), (1.0, 1, 1), (2.5, 1, 3), (99.0, 1, 5), (6.0, 4, 2)],
)
def test_deadline_stops_after_the_current_step(
    clock: Clock, deadline: float, slowdown: float, steps: int
) -> None:
    report = timed(clock, 5, deadline, slowdown)
    assert report.completed_steps == steps
    assert len(report.losses) == steps * 2
    assert report.compute_seconds == pytest.approx(steps * slowdown, abs=2e-4)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_slowdown_counts_as_computing_and_leaves_the_core_to_others(
    clock: Clock, share: float
) -> None:
    clock.share = share
    report = timed(clock, 3, 0.0, slowdown=4.0)
    assert report.completed_steps == 3
    assert report.compute_seconds == pytest.approx(12.0, abs=2e-4)
    assert report.ended_at == pytest.approx(1012.0, abs=2e-4)
    if share == 1.0:
        assert clock.naps == []
    else:  # three times 5 ms awake, then 0.1 s asleep and 5 ms awake in turn
        assert sum(clock.naps) == pytest.approx((9.0 - 0.01) * 100 / 105, abs=0.02)
        assert max(clock.naps) <= 0.1


# --- seconds per step


class SlowModel(nn.Module):
    """Takes so many seconds for a forward pass, the first one 0.3 s more; notes batch sizes."""

    def __init__(self, clock: Clock | None = None, seconds: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.sizes: list[int] = []
        self._clock, self._seconds = clock, seconds

    def forward(self, inputs: Tensor) -> Tensor:
        if self._clock is not None:
            self._clock.now += self._seconds if self.sizes else self._seconds + 0.3
        self.sizes.append(len(inputs))
        outputs: Tensor = self.layers(inputs)
        return outputs.mean(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("step", "slowdown", "batch_size", "expected", "steps"),
    [
        (0.01, 1.0, 4, 0.01, 1 + 3 + 3 * 10),  # 1 to warm up, 3 to look, 3 orders of 0.1 s
        (0.15, 1.0, 4, 0.15, 1 + 3),  # slow steps are measured three times and no more
        (0.01, 3.0, 4, 0.03, 1 + 3 + 3 * 3),  # a slowdown counts once: twice would be 0.09
        (0.01, 1.0, 50, 0.01, 1 + 3 + 3 * 10),  # more samples than there are
    ],
)
def test_seconds_per_step_without_the_first(
    clock: Clock, step: float, slowdown: float, batch_size: int, expected: float, steps: int
) -> None:
    model = SlowModel(clock, step)
    sgd = LocalSGD(model, DATA, squares, slowdown=slowdown)
    assert seconds_per_step(sgd, batch_size, seconds=0.3) == pytest.approx(expected, abs=1e-4)
    assert model.sizes == [batch_size] * steps


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("rounds_before", "with_state"), [(0, True), (0, False), (1, True)])
def test_seconds_per_step_changes_no_bit_of_training(
    optimizer: str, rounds_before: int, with_state: bool
) -> None:
    """Weights and random numbers are as before; momentum in a state is, in the object forgotten."""
    arrays, models = ArrayRecord(SlowModel().state_dict()), []
    for calibrate in (False, True):
        sgd = LocalSGD(SlowModel(), DATA, squares, optimizer=optimizer, weight_decay=0.1)
        sgd.model.load_state_dict(arrays.to_torch_state_dict())
        state = RecordDict() if with_state else None
        for server_round in (0, 1):
            if calibrate and server_round == rounds_before:
                torch.manual_seed(3)
                before = torch.get_rng_state(), sgd.model.layers[0].weight.detach().clone()
                seconds_per_step(sgd, 2, seconds=0.01)
                assert torch.equal(torch.get_rng_state(), before[0])
                assert torch.equal(sgd.model.layers[0].weight, before[1])
            report = sgd.run(order_of(PAIR * 2, arrays=arrays, seed=server_round), state)
        models.append(report.arrays)
    assert same_bits(*models)
