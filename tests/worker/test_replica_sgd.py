"""Several orders in one batched step give what LocalSGD gives one after another."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.errors import UsageError
from flower_blsgd.models.resnet import CifarResNet
from flower_blsgd.protocol import MOMENTUM
from flower_blsgd.tasks.augmentation import random_crop_and_flip
from flower_blsgd.worker.replica_sgd import CannotBatchError, ReplicaSGD

from .replica_orders import (
    SAMPLES,
    SIZE,
    STEPS,
    copied,
    furthest,
    images,
    made,
    one_by_one,
    order_of,
    perceptron,
    points,
)

WORKERS = 3
ROUNDING = 1e-10


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps this small only wait for other threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def resnet() -> nn.Module:
    return CifarResNet(1, 10, "B")


def together(
    sgd: ReplicaSGD, orders: list[TrainOrder], states: list[RecordDict] | None = None
) -> list[TrainReport]:
    held: list[Any] = [None] * len(orders) if states is None else states
    return sgd.run(list(zip(orders, held, strict=True)))


def assert_same_rounds(
    local: LocalSGD, replicas: ReplicaSGD, policy: str, rounds: int = 3, **changes: Any
) -> None:
    """Several rounds, each from worker 1's model of the round before, on both ways."""
    model = local.model
    start = copied(ArrayRecord(model.state_dict()))
    arrays, momentum = [start, start], [None, None]
    states: list[list[RecordDict]] = [[RecordDict() for _ in range(WORKERS)] for _ in range(2)]
    for server_round in range(1, rounds + 1):
        reports = []
        for way in range(2):
            orders = [
                order_of(
                    worker,
                    arrays[way],
                    server_round,
                    momentum_policy=policy,
                    momentum=momentum[way],
                    learning_rate=0.05 / (1 + worker),
                    **changes,
                )
                for worker in range(WORKERS)
            ]
            reports.append(
                together(replicas, orders, states[way])
                if way
                else one_by_one(local, orders, states[way])
            )
        for worker, (one, other) in enumerate(zip(*reports, strict=True)):
            assert furthest(one.arrays, other.arrays) < ROUNDING, (server_round, worker)
            assert other.losses == pytest.approx(one.losses, rel=1e-6, abs=1e-7)
            assert other.losses.dtype == np.float32
            assert other.completed_steps == STEPS
            kept = [states[way][worker].array_records.get(MOMENTUM) for way in range(2)]
            assert (kept[0] is None) == (kept[1] is None) == (policy != "keep")
            if kept[0] is not None:
                assert kept[1] is not None
                assert furthest(kept[0], kept[1]) < ROUNDING
            assert (one.momentum is None) == (other.momentum is None) == (policy != "average")
            if one.momentum is not None:
                assert other.momentum is not None
                assert furthest(one.momentum, other.momentum) < ROUNDING
        arrays = [copied(report[1].arrays) for report in reports]
        momentum = [copied(report[1].momentum) for report in reports]
    assert furthest(start, arrays[1]) > 0.01  # it did train


# --- against LocalSGD


@pytest.mark.parametrize("policy", ["keep", "reset", "average"])
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.8, "nesterov": True},
        {"optimizer": "adamw", "weight_decay": 0.1},
    ],
    ids=["momentum", "nesterov", "adamw"],
)
def test_same_as_local_sgd(settings: dict[str, Any], policy: str) -> None:
    local = LocalSGD(made(perceptron), points(), **settings)
    assert_same_rounds(local, ReplicaSGD(made(perceptron, 7), points(), **settings), policy)


@pytest.mark.parametrize("augment", [None, random_crop_and_flip], ids=["plain", "augmented"])
@pytest.mark.parametrize("policy", ["keep", "average"])
def test_same_as_local_sgd_with_batchnorm_and_augmentation(policy: str, augment: Any) -> None:
    settings = {"momentum": 0.9, "weight_decay": 1e-4, "augment": augment}
    local = LocalSGD(made(resnet), images(), **settings)
    assert_same_rounds(local, ReplicaSGD(made(resnet, 7), images(), **settings), policy, 2)


def test_same_as_local_sgd_without_momentum() -> None:
    orders = [order_of(w, ArrayRecord(made(perceptron).state_dict())) for w in range(WORKERS)]
    states = [RecordDict() for _ in orders]
    found = together(ReplicaSGD(made(perceptron), points(), momentum=0.0), orders, states)
    expected = one_by_one(LocalSGD(made(perceptron), points(), momentum=0.0), orders, [None] * 3)
    for one, other in zip(expected, found, strict=True):
        assert furthest(one.arrays, other.arrays) < ROUNDING
    assert [len(state) for state in states] == [0] * WORKERS


def test_workers_that_join_later_begin_with_zero_momentum_and_counters() -> None:
    """Two have trained before, the third comes new: its AdamW counts from one."""
    settings: dict[str, Any] = {"optimizer": "adamw", "weight_decay": 0.1}
    local = LocalSGD(made(perceptron), points(), **settings)
    arrays = copied(ArrayRecord(local.model.state_dict()))
    states: list[list[RecordDict]] = [[RecordDict() for _ in range(WORKERS)] for _ in range(2)]
    for state in (states[0][0], states[0][1], states[1][0], states[1][1]):
        local.run(order_of(5, arrays), state)
    orders = [order_of(worker, arrays, 2) for worker in range(WORKERS)]
    expected = one_by_one(local, orders, states[0])
    found = together(ReplicaSGD(made(perceptron), points(), **settings), orders, states[1])
    for worker in range(WORKERS):
        assert furthest(expected[worker].arrays, found[worker].arrays) < ROUNDING
        kept = [states[way][worker].array_records[MOMENTUM] for way in range(2)]
        assert furthest(*kept) < ROUNDING
        assert float(kept[1]["step/0.bias"].numpy()) == STEPS * (1 if worker == 2 else 2)


def test_state_may_go_on_with_local_sgd_and_come_back() -> None:
    local = LocalSGD(made(perceptron), points())
    replicas = ReplicaSGD(made(perceptron), points())
    arrays = copied(ArrayRecord(local.model.state_dict()))
    states = [[RecordDict(), RecordDict()] for _ in range(2)]
    for server_round in (1, 2, 3):
        orders = [order_of(worker, arrays, server_round) for worker in range(2)]
        expected = one_by_one(local, orders, states[0])
        found = (
            one_by_one(local, orders, states[1])
            if server_round == 2
            else together(replicas, orders, states[1])
        )
    for one, other in zip(expected, found, strict=True):
        assert furthest(one.arrays, other.arrays) < ROUNDING


def test_float32_buffers_keep_their_types() -> None:
    model = resnet()
    orders = [order_of(w, ArrayRecord(model.state_dict())) for w in range(2)]
    for report in together(ReplicaSGD(model, images()), orders, [RecordDict(), RecordDict()]):
        tracked = report.arrays["bn1.num_batches_tracked"].numpy()
        assert (tracked.shape, tracked.dtype, int(tracked)) == ((), np.int64, STEPS)
        assert report.arrays["bn1.running_mean"].numpy().dtype == np.float32
        assert set(report.arrays) == set(model.state_dict())


class Tied(nn.Module):
    """One weight under two names, a frozen one, one that is not used, a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight
        self.frozen = nn.Linear(3, 4)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.outer(torch.tanh(self.inner(inputs))) * self.scale
        self.seen = self.seen + inputs.detach().sum()
        logits: Tensor = self.frozen(outputs)
        return logits


def test_unusual_models_too() -> None:
    settings: dict[str, Any] = {"weight_decay": 0.1}
    local = LocalSGD(made(Tied), points(), **settings)
    assert_same_rounds(local, ReplicaSGD(made(Tied), points(), **settings), "keep")
    state = RecordDict()
    model = made(Tied)
    order = order_of(0, ArrayRecord(model.state_dict()))
    (report, _) = together(ReplicaSGD(model, points()), [order] * 2, [state, RecordDict()])
    assert {"frozen.weight", "unused"}.isdisjoint(state.array_records[MOMENTUM])
    assert float(report.arrays["seen"].numpy()) != 0.0
    assert report.arrays["unused"].numpy().tolist() == [1.0, 1.0]


def test_bfloat16_is_refused() -> None:
    """Outside vmap autocast keeps cross entropy in float32, and inside it does not."""
    weights = torch.randn(2, 4, 4)

    def losses(weight: Tensor) -> Tensor:
        outputs = torch.ones(3, 4) @ weight
        return nn.functional.cross_entropy(outputs, torch.zeros(3).long(), reduction="none")

    with torch.autocast("cpu", torch.bfloat16):
        kinds = losses(weights[0]).dtype, torch.func.vmap(losses)(weights).dtype
    assert kinds == (torch.float32, torch.bfloat16)  # if this changes, it need not be refused
    with pytest.raises(UsageError, match='use "tf32"'):
        ReplicaSGD(made(perceptron), points(), precision="bfloat16")


# --- randomness


def dropout() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 4))


def dropped(seeds: list[int]) -> list[list[float]]:
    arrays = ArrayRecord(made(dropout).state_dict())
    same = np.arange(STEPS * SIZE, dtype=np.int32)
    orders = [order_of(0, arrays, seed=seed, indices=same) for seed in seeds]
    states = [RecordDict() for _ in orders]
    return [
        r.losses.tolist() for r in together(ReplicaSGD(made(dropout), points()), orders, states)
    ]


def test_randomness_of_the_model_differs_between_workers_and_repeats() -> None:
    sgd = dropped([1, 2])
    assert sgd[0] != sgd[1]
    torch.rand(3)  # whatever else draws
    assert dropped([1, 2]) == sgd
    assert dropped([1, 3]) != sgd


def test_randomness_of_others_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    dropped([1, 2])
    assert torch.equal(torch.rand(4), expected)


# --- what fits


def test_fits_only_what_can_be_computed_together() -> None:
    replicas = ReplicaSGD(made(perceptron), points())
    arrays, state = ArrayRecord(made(perceptron).state_dict()), RecordDict()
    assert replicas.fits(order_of(0, arrays), state)
    assert replicas.fits(order_of(0, arrays, momentum_policy="reset"), None)
    assert not replicas.fits(order_of(0, arrays), None)
    assert not replicas.fits(order_of(0, arrays, deadline_seconds=1.0), state)
    beyond = np.full(STEPS * SIZE, SAMPLES, np.int32)
    assert not replicas.fits(order_of(0, arrays, indices=beyond), state)
    wider = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    assert not replicas.fits(order_of(0, ArrayRecord(wider.state_dict())), state)
    assert not replicas.fits(order_of(0, ArrayRecord(dropout().state_dict())), state)


class ReadsANumber(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs * 2 if float(outputs.detach().sum()) > 0 else outputs


def test_model_that_cannot_be_batched_is_refused_before_anything_changed() -> None:
    replicas = ReplicaSGD(ReadsANumber(3, 4).double(), points())
    arrays, state = ArrayRecord(nn.Linear(3, 4).double().state_dict()), RecordDict()
    with pytest.raises(CannotBatchError, match=r"RuntimeError: .*vmap") as told:
        together(replicas, [order_of(w, arrays) for w in range(2)], [state, RecordDict()])
    assert "\n" not in str(told.value)
    assert told.value.__context__ is None  # its traceback would keep the step's memory
    assert len(state) == 0


def test_error_of_a_model_that_worked_before_is_told_as_it_is() -> None:
    fails = [False]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if fails[0]:
            raise ArithmeticError("the sum is wrong")
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    replicas = ReplicaSGD(made(perceptron), points(), loss)
    arrays = ArrayRecord(made(perceptron).state_dict())
    states = [RecordDict(), RecordDict()]
    together(replicas, [order_of(w, arrays) for w in range(2)], states)
    before = copied(states[0].array_records[MOMENTUM])
    fails[0] = True
    with pytest.raises(ArithmeticError, match="the sum is wrong"):
        together(replicas, [order_of(w, arrays, 2) for w in range(2)], states)
    assert furthest(before, states[0].array_records[MOMENTUM]) == 0.0


def test_loss_that_is_a_mean_is_refused() -> None:
    replicas = ReplicaSGD(made(perceptron), points(), nn.functional.cross_entropy)
    arrays = ArrayRecord(made(perceptron).state_dict())
    with pytest.raises(CannotBatchError, match="one value per sample"):
        together(replicas, [order_of(w, arrays) for w in range(2)], [RecordDict(), RecordDict()])


def test_times_are_those_of_all() -> None:
    replicas = ReplicaSGD(made(perceptron), points())
    arrays = ArrayRecord(made(perceptron).state_dict())
    one, two = together(replicas, [order_of(w, arrays) for w in range(2)], [RecordDict()] * 2)
    assert one.compute_seconds == two.compute_seconds > 0
    assert one.ended_at == pytest.approx(one.started_at + one.compute_seconds)
    assert dataclasses.replace(one, losses=two.losses, arrays=two.arrays) == two
