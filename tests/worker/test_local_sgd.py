"""The steps of one order, by hand-worked numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.worker.model_io import state_record

from .helpers import order_for

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
    arrays = changes.pop("arrays", None) or ArrayRecord(model_of(1.0).state_dict())
    return order_for(arrays, indices, batch_size, **changes)


def weight_after(report: TrainReport) -> float:
    return float(report.arrays["weight"].numpy()[0, 0])


# --- steps


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        ({"momentum": 0.0}, 0.25),  # 1 - 0.1 x 5 = 0.5, - 0.1 x 2.5
        ({}, -0.2),  # momentum 0.9: v = 5, then 4.5 + 2.5 = 7
        # g + 0.9 v: 5 + 4.5 = 9.5 -> 0.05; v = 4.5 + 0.25, 0.25 + 0.9 x 4.75 = 4.525
        ({"nesterov": True}, -0.4025),
        ({"momentum": 0.0, "weight_decay": 0.5}, 0.45 * 0.45),  # each 1 - 0.1 x 5.5 times
        ({"momentum": 0.0, "clip_norm": 3.0}, 0.4),  # gradients 5, then 5 x 0.7: 3 of both
    ],
    ids=["plain", "momentum by default", "nesterov", "weight decay", "clipped"],
)
def test_steps_by_hand(settings: dict[str, Any], weight: float) -> None:
    report = LocalSGD(model_of(), DATA, squares, **settings).run(order_of(PAIR * 2))
    assert weight_after(report) == pytest.approx(weight)
    assert (report.completed_steps, report.batch_size) == (2, 2)


@pytest.mark.parametrize("micro_batch_size", [0, 2])
def test_weights_act_on_the_gradient_and_not_on_the_losses(micro_batch_size: int) -> None:
    """Of x = 1, 2, 3 weighing 2, 0, 1 it is 2 w (2 x 1 + 0 x 4 + 1 x 9) / 3 = 22 w / 3."""
    weights = np.array([2, 0, 1], np.float32)
    changes = {"sample_weights": weights, "learning_rate": 0.03}
    sgd = sgd_of(micro_batch_size=micro_batch_size)
    report = sgd.run(order_of([0, 1, 2], batch_size=3, **changes))
    assert weight_after(report) == pytest.approx(1 - 0.22)
    assert report.losses.tolist() == pytest.approx([1.0, 4.0, 9.0])


def test_each_step_has_the_weights_of_its_own_samples() -> None:
    """5 w with the weights 1 and 1; then, with 2 and 0, only x = 1 counts: 2 w."""
    weights = np.array([1, 1, 2, 0], np.float32)
    report = sgd_of().run(order_of(PAIR * 2, sample_weights=weights))
    assert weight_after(report) == pytest.approx(0.5 - 0.1 * 2 * 0.5)


@pytest.mark.parametrize(
    ("clip_norm", "micro_batch_size", "expected"),
    [
        (0.5, 0, [-0.03, -0.04]),  # the mean gradient is (3, 4), of norm 5
        (0.5, 1, [-0.03, -0.04]),  # not of each: (3, 0) and (0, 4)
        (5.5, 1, [-0.3, -0.4]),
        (0.0, 1, [-0.3, -0.4]),
    ],
)
def test_norm_that_is_clipped_is_that_of_the_batch_over_all_parameters(
    clip_norm: float, micro_batch_size: int, expected: list[float]
) -> None:
    class TwoWeights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs @ torch.cat([self.a, self.b])

    data = torch.tensor([[6.0, 0.0], [0.0, 8.0]]), torch.zeros(2)
    settings = {"clip_norm": clip_norm, "micro_batch_size": micro_batch_size}
    sgd = LocalSGD(TwoWeights(), data, lambda outputs, _: outputs, **settings)  # type: ignore[arg-type]
    arrays = sgd.run(order_of(PAIR, arrays=state_record(TwoWeights()))).arrays
    assert [arrays[name].numpy().item() for name in "ab"] == pytest.approx(expected, rel=1e-5)


def test_steps_begin_with_the_orders_model_and_learning_rate_and_leave_the_order_alone() -> None:
    sgd = sgd_of()
    order = order_of(PAIR * 2)
    for _ in range(2):
        assert weight_after(sgd.run(order)) == pytest.approx(0.25)
    assert order.arrays["weight"].numpy().tolist() == [[1.0]]
    assert order.indices.tolist() == PAIR * 2
    other = ArrayRecord(model_of(2.0).state_dict())
    assert weight_after(sgd.run(order_of(PAIR, arrays=other))) == pytest.approx(1.0)
    assert weight_after(sgd.run(order_of(PAIR, learning_rate=0.02))) == pytest.approx(0.9)


# --- randomness and mode


def test_dropout_is_a_function_of_the_orders_seed_and_leaves_the_generator_alone() -> None:
    def losses(seed: int) -> list[float]:
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1, bias=False))
        sgd = LocalSGD(model, (torch.ones(64, 1), torch.zeros(64)), squares)
        arrays = ArrayRecord({"1.weight": Array(np.ones((1, 1), np.float32))})
        order = order_of(list(range(64)), 32, seed=seed, arrays=arrays)
        before = torch.get_rng_state()
        report = sgd.run(order)
        assert torch.equal(torch.get_rng_state(), before)
        return report.losses.tolist()

    first = losses(5)
    assert losses(5) == first
    assert losses(6) != first


def test_augmentation_draws_from_a_generator_that_the_orders_seed_begins() -> None:
    drawn: list[float] = []

    def augment(inputs: Tensor, generator: torch.Generator) -> Tensor:
        drawn.append(float(torch.rand(1, generator=generator)))
        return inputs

    sgd = sgd_of(augment=augment)
    for seed in (5, 6, 5):
        sgd.run(order_of(PAIR * 2, seed=seed))
    expected = torch.Generator().manual_seed(5)
    assert drawn[:2] == [float(torch.rand(1, generator=expected)) for _ in range(2)]
    assert drawn[4:] == drawn[:2]
    assert not set(drawn[2:4]) & set(drawn[:2])


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


KEPT, FRESH = 1 - 0.1 * (0.9 * 5 + 5), 1 - 0.1 * 5


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("policy", "weight"), [("keep", KEPT), ("reset", FRESH)])
def test_momentum_from_order_to_order(policy: str, weight: float, with_state: bool) -> None:
    state = RecordDict() if with_state else None
    sgd = sgd_of(momentum=0.9)
    sgd.run(order_of(PAIR, momentum_policy=policy), state)
    sgd = sgd_of(momentum=0.9) if with_state else sgd  # the state outlives the process
    report = sgd.run(order_of(PAIR, momentum_policy=policy), state)
    assert weight_after(report) == pytest.approx(weight)
    assert report.momentum is None
    if state is not None:
        kept = state.array_records.get("momentum", {})
        assert {name: a.numpy().item() for name, a in kept.items()} == (
            {"weight": pytest.approx(9.5)} if policy == "keep" else {}
        )


@pytest.mark.parametrize("with_state", [False, True])
def test_momentum_is_zero_after_an_order_that_raised(with_state: bool) -> None:
    burning = False

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if burning and len(outputs) and float(outputs[0].detach()) < 1:  # in the second step
            raise RuntimeError("the fan stands still")
        return squares(outputs, targets)

    state = RecordDict() if with_state else None
    sgd = LocalSGD(model_of(), DATA, loss)
    sgd.run(order_of(PAIR), state)
    burning = True
    with pytest.raises(RuntimeError, match="the fan stands still"):
        sgd.run(order_of(PAIR * 2), state)
    burning = False
    assert weight_after(sgd.run(order_of(PAIR), state)) == pytest.approx(FRESH)


def test_momentum_is_that_of_each_state_and_of_what_is_trained() -> None:
    """Two nodes may share one object; a frozen parameter has none, nor has a momentum of 0."""
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.bias)
    model.bias.requires_grad_(False)
    sgd, one, two = LocalSGD(model, DATA, squares), RecordDict(), RecordDict()
    arrays = ArrayRecord(
        {"weight": Array(np.ones((1, 1), np.float32)), "bias": Array(np.zeros(1, np.float32))}
    )
    weights = [
        weight_after(sgd.run(order_of(PAIR, arrays=arrays), state)) for state in (one, two, one)
    ]
    assert weights == pytest.approx([FRESH, FRESH, KEPT])
    assert set(one.array_records["momentum"]) == {"weight"}
    state = RecordDict()
    sgd_of(momentum=0.0).run(order_of(PAIR), state)
    assert len(state) == 0


# --- what is refused


@pytest.mark.parametrize("index", [3, -1])
def test_refused_index_that_is_not_in_the_data_changes_nothing(index: int) -> None:
    sgd, state = sgd_of(momentum=0.9), RecordDict()
    sgd.run(order_of(PAIR), state)
    with pytest.raises(IndexError, match=f"sample {index}, but this worker's data set has 3"):
        sgd.run(order_of([0, index]), state)
    assert weight_after(sgd.run(order_of(PAIR), state)) == pytest.approx(KEPT)


def test_refused_loss_that_is_a_mean() -> None:
    sgd = LocalSGD(model_of(), DATA, lambda outputs, targets: squares(outputs, targets).mean())
    with pytest.raises(ValueError, match='reduction="none"'):
        sgd.run(order_of(PAIR))
