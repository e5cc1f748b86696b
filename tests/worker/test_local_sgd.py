"""The steps of one order, by hand-worked numbers."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, TensorDataset

from flower_blsgd import LocalSGD, TrainOrder, TrainReport

# One weight w and the loss (w x)^2. A batch of x = 1 and x = 2 has the gradient
# (2 w + 8 w) / 2 = 5 w, and the losses w^2 and 4 w^2.
DATA = (torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3))
PAIR = [0, 1]


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(1) - targets).square()


def model_of(weight: float = 0.0) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


def sgd_of(**settings: Any) -> LocalSGD:
    arguments: dict[str, Any] = {"momentum": 0.0}
    return LocalSGD(model_of(), DATA, squares, **(arguments | settings))


def order_of(indices: list[int], batch_size: int = 2, **changes: Any) -> TrainOrder:
    order = TrainOrder(
        round=1,
        epoch=1,
        local_steps=len(indices) // batch_size,
        batch_size=batch_size,
        learning_rate=0.1,
        seed=0,
        deadline_seconds=0.0,
        momentum_policy="keep",
        indices=np.array(indices, np.int32),
        arrays=ArrayRecord(model_of(1.0).state_dict()),
    )
    return dataclasses.replace(order, **changes)


def weight_after(report: TrainReport) -> float:
    return float(report.arrays["weight"].numpy()[0, 0])


# --- steps


def test_steps_of_plain_sgd() -> None:
    report = sgd_of().run(order_of(PAIR * 2))
    assert weight_after(report) == pytest.approx(0.25)  # 1 - 0.1 x 5 = 0.5, - 0.1 x 2.5
    assert report.completed_steps == 2
    assert report.batch_size == 2


def test_steps_with_momentum() -> None:
    report = sgd_of(momentum=0.9).run(order_of(PAIR * 2))
    assert weight_after(report) == pytest.approx(-0.2)  # v = 5, then 4.5 + 2.5 = 7


def test_steps_default_momentum_is_nine_tenths_without_nesterov() -> None:
    report = LocalSGD(model_of(), DATA, squares).run(order_of(PAIR * 2))
    assert weight_after(report) == pytest.approx(-0.2)


def test_steps_with_nesterov() -> None:
    report = sgd_of(momentum=0.9, nesterov=True).run(order_of(PAIR * 2))
    # g + 0.9 v: 5 + 4.5 = 9.5 -> 0.05; v = 4.5 + 0.25, 0.25 + 0.9 x 4.75 = 4.525
    assert weight_after(report) == pytest.approx(-0.4025)


def test_steps_with_weight_decay() -> None:
    report = sgd_of(weight_decay=0.5).run(order_of(PAIR))
    assert weight_after(report) == pytest.approx(1 - 0.1 * 5.5)


def test_steps_take_the_learning_rate_from_the_order() -> None:
    sgd = sgd_of()
    assert weight_after(sgd.run(order_of(PAIR, learning_rate=0.02))) == pytest.approx(0.9)
    assert weight_after(sgd.run(order_of(PAIR, learning_rate=0.04))) == pytest.approx(0.8)


def test_steps_begin_with_the_orders_model_each_time() -> None:
    sgd = sgd_of()
    first = weight_after(sgd.run(order_of(PAIR)))
    assert weight_after(sgd.run(order_of(PAIR))) == first == pytest.approx(0.5)
    other = order_of(PAIR, arrays=ArrayRecord(model_of(2.0).state_dict()))
    assert weight_after(sgd.run(other)) == pytest.approx(1.0)


def test_steps_do_not_change_the_order() -> None:
    order = order_of(PAIR * 2)
    sgd_of().run(order)
    assert order.arrays["weight"].numpy().tolist() == [[1.0]]
    assert order.indices.tolist() == PAIR * 2


def test_losses_are_those_before_each_step_in_the_order_of_the_indices() -> None:
    report = sgd_of().run(order_of([1, 0, 0, 1]))
    assert report.losses.tolist() == pytest.approx([4.0, 1.0, 0.25, 1.0])
    assert report.losses.dtype == np.float32
    assert report.mean_loss == pytest.approx(6.25 / 4)


def test_losses_of_batches_of_one() -> None:
    report = sgd_of().run(order_of([2, 0], batch_size=1))
    # w = 1: loss 9, gradient 18, w = -0.8: loss 0.64
    assert report.losses.tolist() == pytest.approx([9.0, 0.64])


@pytest.mark.parametrize("samples", [TensorDataset(*DATA), [*DATA]], ids=["TensorDataset", "list"])
def test_steps_on_other_kinds_of_data(samples: Any) -> None:
    sgd = LocalSGD(model_of(), samples, squares, momentum=0.0)
    assert weight_after(sgd.run(order_of(PAIR * 2))) == pytest.approx(0.25)


def test_steps_on_a_map_style_dataset() -> None:
    class Pairs(Dataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[Tensor, float]:
            return DATA[0][index], 0.0

    sgd = LocalSGD(model_of(), Pairs(), squares, momentum=0.0)
    assert weight_after(sgd.run(order_of(PAIR * 2))) == pytest.approx(0.25)


def test_steps_default_loss_is_cross_entropy_per_sample() -> None:
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    sgd = LocalSGD(model, (DATA[0], torch.tensor([0, 1, 1])))
    order = order_of(PAIR, arrays=ArrayRecord(model.state_dict()))
    assert sgd.run(order).losses.tolist() == pytest.approx([math.log(2)] * 2)


def test_steps_keep_the_dtype_of_the_model() -> None:
    model = model_of().double()
    data = (DATA[0].double(), DATA[1].double())
    arrays = ArrayRecord(model_of(1.0).double().state_dict())
    report = LocalSGD(model, data, squares, momentum=0.0).run(order_of(PAIR, arrays=arrays))
    assert report.arrays["weight"].numpy().dtype == np.float64
    assert report.arrays["weight"].numpy()[0, 0] == pytest.approx(0.5, abs=1e-12)
    assert report.losses.dtype == np.float32


def test_steps_do_not_wait_for_the_device() -> None:
    """Reading a number out of a tensor would make the host wait for an accelerator."""

    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if "_local_scalar_dense" in str(func):
                raise AssertionError("a step reads a value out of a tensor")
            return func(*args, **(kwargs or {}))

    with NoReading():
        with pytest.raises(AssertionError, match="reads a value"):
            torch.ones(1).sum().item()
        report = sgd_of(momentum=0.9, weight_decay=0.1).run(order_of(PAIR * 3))
    assert report.completed_steps == 3


# --- randomness and mode


def dropout_run(seed: int) -> Callable[[], list[float]]:
    """Return a function that runs an order and returns its losses."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1, bias=False))
    sgd = LocalSGD(model, (torch.ones(64, 1), torch.zeros(64)), squares, momentum=0.0)
    arrays = ArrayRecord({"1.weight": Array(np.ones((1, 1), np.float32))})
    order = order_of(list(range(64)), 32, seed=seed, arrays=arrays)

    def run() -> list[float]:
        return sgd.run(order).losses.tolist()

    return run


def test_randomness_is_a_function_of_the_orders_seed() -> None:
    run = dropout_run(5)
    first = run()
    torch.rand(3)  # whatever else draws
    assert run() == first
    assert dropout_run(5)() == first
    assert dropout_run(6)() != first


def test_randomness_of_others_is_left_alone() -> None:
    run = dropout_run(5)
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    run()
    assert torch.equal(torch.rand(4), expected)


def test_batchnorm_is_in_train_mode_and_its_buffers_come_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1, bias=False)).eval()
    arrays = ArrayRecord(model.state_dict())
    report = LocalSGD(model, DATA, squares).run(order_of(PAIR * 2, arrays=arrays))
    # x = 1 and 2: mean 1.5, unbiased variance 0.5; twice with momentum 0.1 from 0 and 1
    assert report.arrays["0.running_mean"].numpy() == pytest.approx([0.15 + 0.9 * 0.15])
    assert report.arrays["0.running_var"].numpy() == pytest.approx([0.81 + 0.5 * 0.19])
    tracked = report.arrays["0.num_batches_tracked"].numpy()
    assert (int(tracked), tracked.dtype) == (2, np.int64)


# --- momentum between orders


def two_orders(sgd: LocalSGD, policy: str, state: RecordDict | None = None) -> float:
    """Return the weight after a second order of one step, which begins at w = 1 again."""
    sgd.run(order_of(PAIR, momentum_policy=policy), state)
    return weight_after(sgd.run(order_of(PAIR, momentum_policy=policy), state))


KEPT, FRESH = 1 - 0.1 * (0.9 * 5 + 5), 1 - 0.1 * 5


def test_momentum_keep_stays_in_the_object_without_a_state() -> None:
    assert two_orders(sgd_of(momentum=0.9), "keep") == pytest.approx(KEPT)


def test_momentum_keep_lives_in_the_state() -> None:
    state = RecordDict()
    assert two_orders(sgd_of(momentum=0.9), "keep", state) == pytest.approx(KEPT)
    assert state.array_records["momentum"]["weight"].numpy()[0, 0] == pytest.approx(9.5)


def test_momentum_keep_survives_the_process_in_the_state() -> None:
    state = RecordDict()
    sgd_of(momentum=0.9).run(order_of(PAIR), state)
    report = sgd_of(momentum=0.9).run(order_of(PAIR), state)
    assert weight_after(report) == pytest.approx(KEPT)


def test_momentum_keep_an_empty_state_begins_with_zero() -> None:
    sgd = sgd_of(momentum=0.9)
    sgd.run(order_of(PAIR), RecordDict())
    assert weight_after(sgd.run(order_of(PAIR), RecordDict())) == pytest.approx(FRESH)


def test_momentum_keep_two_nodes_may_share_one_object() -> None:
    sgd = sgd_of(momentum=0.9)
    one, two = RecordDict(), RecordDict()
    sgd.run(order_of(PAIR), one)
    assert weight_after(sgd.run(order_of(PAIR), two)) == pytest.approx(FRESH)
    assert weight_after(sgd.run(order_of(PAIR), one)) == pytest.approx(KEPT)


@pytest.mark.parametrize("with_state", [False, True])
def test_momentum_reset_begins_with_zero(with_state: bool) -> None:
    state = RecordDict() if with_state else None
    assert two_orders(sgd_of(momentum=0.9), "reset", state) == pytest.approx(FRESH)


def test_momentum_average_takes_the_servers_and_reports_its_own() -> None:
    sgd = sgd_of(momentum=0.9)
    first = sgd.run(order_of(PAIR, momentum_policy="average"))
    assert weight_after(first) == pytest.approx(FRESH)
    assert first.momentum is not None
    assert first.momentum["weight"].numpy()[0, 0] == pytest.approx(5.0)
    averaged = ArrayRecord({"weight": Array(np.full((1, 1), 2.0, np.float32))})
    second = sgd.run(order_of(PAIR, momentum_policy="average", momentum=averaged))
    assert weight_after(second) == pytest.approx(1 - 0.1 * (0.9 * 2 + 5))
    assert averaged["weight"].numpy()[0, 0] == 2.0


@pytest.mark.parametrize("policy", ["keep", "reset"])
def test_momentum_is_not_reported_by_the_other_policies(policy: str) -> None:
    assert sgd_of(momentum=0.9).run(order_of(PAIR, momentum_policy=policy)).momentum is None


def test_momentum_of_zero_leaves_the_state_empty() -> None:
    state = RecordDict()
    sgd_of(momentum=0.0).run(order_of(PAIR), state)
    assert len(state) == 0


def test_momentum_of_a_frozen_parameter_is_left_out() -> None:
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    state = RecordDict()
    sgd = LocalSGD(model, DATA, squares)
    for _ in range(2):
        report = sgd.run(order_of(PAIR, arrays=ArrayRecord(model.state_dict())), state)
    assert set(state.array_records["momentum"]) == {"weight"}
    assert report.arrays["bias"].numpy().tolist() == model.bias.tolist()


# --- time


class Clock:
    """Time that passes only where the test lets it pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float] = []

    def perf_counter(self) -> float:
        return self.now

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
    monkeypatch.setattr("flower_blsgd.worker.local_sgd.time", clock)
    monkeypatch.setattr("flower_blsgd.worker.slowdown.time", clock)
    return clock


def timed(clock: Clock, steps: int, deadline_seconds: float, slowdown: float = 1.0) -> TrainReport:
    sgd = LocalSGD(TakesOneSecond(clock), DATA, squares, slowdown=slowdown)
    return sgd.run(order_of(PAIR * steps, deadline_seconds=deadline_seconds))


def test_time_of_the_steps_is_reported(clock: Clock) -> None:
    clock.now = 7.0
    report = timed(clock, 3, 0.0)
    assert report.compute_seconds == 3.0
    assert (report.started_at, report.ended_at) == (1007.0, 1010.0)


@pytest.mark.parametrize(
    ("deadline", "steps"), [(0.0, 5), (0.5, 1), (1.0, 1), (2.5, 3), (3.0, 3), (99.0, 5)]
)
def test_deadline_stops_after_the_current_step(clock: Clock, deadline: float, steps: int) -> None:
    report = timed(clock, 5, deadline)
    assert report.completed_steps == steps
    assert len(report.losses) == steps * 2
    assert report.compute_seconds == steps


def test_deadline_leaves_the_model_of_the_steps_that_were_done() -> None:
    short = sgd_of().run(order_of(PAIR * 5, deadline_seconds=1e-9))
    assert short.completed_steps == 1
    assert weight_after(short) == pytest.approx(0.5)
    assert short.losses.tolist() == pytest.approx([1.0, 4.0])


def test_slowdown_sleeps_in_short_pieces_and_counts_as_computing(clock: Clock) -> None:
    report = timed(clock, 3, 0.0, slowdown=4.0)
    assert report.completed_steps == 3
    assert report.compute_seconds == 12.0
    assert report.ended_at == 1012.0
    assert sum(clock.naps) == 9.0
    assert max(clock.naps) <= 1.0  # no handler blocks longer than a second in one call


def test_slowdown_of_one_never_sleeps(clock: Clock) -> None:
    timed(clock, 3, 0.0)
    assert clock.naps == []


def test_slowdown_under_a_deadline_does_what_the_slower_device_would(clock: Clock) -> None:
    # Steps that take 4 s each: at 6 s the second is under way, and it stops after it, at 8 s.
    report = timed(clock, 5, 6.0, slowdown=4.0)
    assert report.completed_steps == 2
    assert report.compute_seconds == 8.0


# --- what is refused


def test_refused_loss_that_is_a_mean() -> None:
    sgd = LocalSGD(model_of(), DATA, lambda outputs, targets: squares(outputs, targets).mean())
    with pytest.raises(ValueError, match='reduction="none"') as told:
        sgd.run(order_of(PAIR))
    assert "(2,)" in str(told.value)


def test_refused_index_beyond_the_data() -> None:
    with pytest.raises(IndexError, match="sample 3, but this worker's data set has 3"):
        sgd_of().run(order_of([0, 3]))


def test_refused_model_of_another_shape() -> None:
    arrays = ArrayRecord({"weight": Array(np.zeros((1, 2), np.float32))})
    with pytest.raises(ValueError, match="'weight' has shape"):
        sgd_of().run(order_of(PAIR, arrays=arrays))


def test_refused_step_that_raises_fails_the_order() -> None:
    class Burns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, 1))

        def forward(self, inputs: Tensor) -> Tensor:
            raise RuntimeError("the fan stands still")

    with pytest.raises(RuntimeError, match="the fan stands still"):
        LocalSGD(Burns(), DATA, squares).run(order_of(PAIR))


# --- by hand in anybody's ClientApp (DESIGN section 5)


def test_by_hand_in_anybodys_client_app() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        order = TrainOrder.from_message(message)
        report = LocalSGD(model_of(), DATA, squares, "cpu").run(order)
        return report.to_reply(message)

    order = order_of(PAIR * 2)
    reply = app(Message(order.to_records(), 7, "train"), Context(1, 7, {}, RecordDict(), {}))
    report = TrainReport.from_reply(reply, order)
    assert report.completed_steps == 2
    assert weight_after(report) == pytest.approx(-0.2)
