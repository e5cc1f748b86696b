"""The algorithms against plain PyTorch, loops written out by hand, and a golden trajectory."""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor, nn

from flower_blsgd import BiasedLocalSGD, LocalSGD
from flower_blsgd.algorithm.averaging import LoadWeighting, PerSampleWeighting, Weighting
from flower_blsgd.algorithm.catalog import ALGORITHMS
from flower_blsgd.algorithm.local_steps import SameSteps, SystemAwareSteps
from flower_blsgd.algorithm.sampling import UniformSampler
from flower_blsgd.config import RunConfig
from flower_blsgd.parts import make_strategy
from flower_blsgd.protocol import TrainOrder, WorkerProfile
from flower_blsgd.tasks import load_task

from .in_process_grid import (
    InProcessGrid,
    MailGrid,
    Order,
    TorchWorker,
    fast_profile,
    same_bits,
    slow_profile,
    stop_at_once,
    tensors_of,
    train_rounds,
)
from .small_training import DECAY, MOMENTUM, NUM_SAMPLES, data, make_model, worker_of

RATE = 0.05


pytestmark = pytest.mark.usefixtures("one_thread")


def train(
    workers: list[TorchWorker],
    order: Order = "sent",
    epochs: int = 3,
    batch_norm: bool = False,
    ids: Iterable[int] = range(10, 99),
    **changes: Any,
) -> ArrayRecord:
    arguments: dict[str, Any] = {
        "batch_size": 4,
        "learning_rate": RATE,
        "min_available_nodes": len(workers),
        "sampler": UniformSampler(),
        "seed": 2,
    }
    strategy = BiasedLocalSGD(NUM_SAMPLES, **(arguments | changes))
    grid = InProcessGrid(dict(zip(ids, workers, strict=False)), order)
    initial = ArrayRecord(make_model(batch_norm).state_dict())
    return strategy.fit(grid, initial, epochs=epochs).arrays


def one_process(orders_of_rounds: Sequence[Sequence[TrainOrder]]) -> nn.Module:
    """Train on everybody's samples of each step as one batch, with torch alone."""
    inputs, targets = data()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    for orders in orders_of_rounds:
        steps = orders[0].local_steps
        batches = [np.split(order.indices.astype(np.int64), steps) for order in orders]
        for parts in zip(*batches, strict=True):
            chosen = torch.from_numpy(np.concatenate(parts))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
    return model


def rounds_of(workers: Sequence[TorchWorker]) -> list[tuple[TrainOrder, ...]]:
    own = ([order for order in worker.orders if order.local_steps] for worker in workers)
    return list(zip(*own, strict=True))


def furthest(arrays: ArrayRecord, model: nn.Module) -> float:
    """Return the largest difference of any number in the two models."""
    expected = model.state_dict()
    found = tensors_of(arrays)
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name].numpy()).max()) for name in found)


def has_moved(model: nn.Module) -> bool:
    start = make_model().state_dict()
    return all(
        float((tensor - start[name]).abs().max()) > 1e-2
        for name, tensor in model.state_dict().items()
    )


# --- against plain PyTorch


def test_one_worker_equals_a_plain_torch_loop() -> None:
    worker = worker_of(fast_profile(0))
    arrays = train([worker], local_steps=3)
    assert len(worker.orders) == 12  # 3 epochs of 48 samples in rounds of 12
    first_epoch = np.concatenate([order.indices for order in worker.orders[:4]])
    assert sorted(first_epoch) == list(range(NUM_SAMPLES))
    model = one_process(rounds_of([worker]))
    assert has_moved(model)
    assert furthest(arrays, model) < 1e-6


@pytest.mark.parametrize("weights", [LoadWeighting(), PerSampleWeighting()])
def test_workers_with_batches_of_their_own_equal_one_process_with_the_sum(
    weights: Weighting,
) -> None:
    """One step each of 6 and 2 samples: SGD with batches of 8."""
    workers = [worker_of(fast_profile(i, batch_size=b)) for i, b in enumerate((6, 2))]
    arrays = train(workers, local_steps=SameSteps(1), weights=weights)
    rounds = rounds_of(workers)
    assert [[len(order.indices) for order in orders] for orders in rounds] == [[6, 2]] * 18
    model = one_process(rounds)
    assert has_moved(model)
    assert furthest(arrays, model) < 1e-5


def test_sample_that_overflows_costs_the_orders_that_hold_it_and_no_others() -> None:
    """It makes model and momentum of whoever trains on it NaN; the next order begins anew."""
    inputs, targets = data()
    inputs[17] = np.inf
    workers = [
        TorchWorker(fast_profile(place), LocalSGD(make_model(), (inputs, targets)))
        for place in range(2)
    ]
    strategy = BiasedLocalSGD(NUM_SAMPLES, 4, 2, sampler=UniformSampler(), learning_rate=RATE)
    grid, initial = InProcessGrid(dict(enumerate(workers))), ArrayRecord(make_model().state_dict())
    ends = train_rounds(strategy, grid, initial, epochs=6)
    assert all(np.isfinite(tensor).all() for tensor in tensors_of(ends[-1].arrays).values())
    for worker in range(2):
        rows = [end.record.workers[worker] for end in ends]
        hit = [17 in order.indices for order in workers[worker].orders]
        assert [bool(row.failure) for row in rows] == [row.momentum_zeroed for row in rows] == hit
        assert 0 < sum(hit) < len(hit) / 2


# --- against the update written out by hand


def by_hand(workers: list[TorchWorker], policy: str, weights: list[float]) -> nn.Module:
    """Replay the workers' orders with SGD written out, in float64, and average."""
    inputs, targets = data()
    model = make_model().double()
    names = [name for name, _ in model.named_parameters()]
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero = {name: torch.zeros_like(start[name]) for name in names}
    kept = [dict(zero) for _ in workers]
    averaged = dict(zero)
    for orders in zip(*(worker.orders for worker in workers), strict=True):
        ends, buffers = [], []
        for rank, order in enumerate(orders):
            v = {"keep": kept[rank], "reset": zero, "average": averaged}[policy]
            x = dict(start)
            for batch in np.split(order.indices, order.local_steps):
                chosen = torch.from_numpy(batch.astype(np.int64))
                leaves = {name: x[name].clone().requires_grad_() for name in names}
                outputs = torch.func.functional_call(model, leaves, inputs[chosen].double())
                loss = nn.functional.cross_entropy(outputs, targets[chosen])
                gradients = torch.autograd.grad(loss, [leaves[name] for name in names])
                for name, gradient in zip(names, gradients, strict=True):
                    v = v | {name: MOMENTUM * v[name] + gradient + DECAY * x[name]}
                    x[name] = x[name] - RATE * v[name]
            kept[rank] = v
            ends.append(x)
            buffers.append(v)
        start = _mean(ends, weights)
        averaged = _mean(buffers, weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name])
    return model


def _mean(parts: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    return {
        name: sum(
            (w * part[name] for part, w in zip(parts, weights, strict=True)),
            start=torch.zeros_like(parts[0][name]),
        )
        for name in parts[0]
    }


@pytest.mark.parametrize("policy", ["keep", "reset", "average"])
def test_momentum_between_rounds_equals_a_loop_by_hand(policy: Any) -> None:
    workers = [worker_of(fast_profile(0)), worker_of(slow_profile(1))]
    arrays = train(workers, local_steps=SystemAwareSteps(3, 1), momentum_buffers=policy)
    assert len(workers[0].orders) == 9
    weights = [0.75, 0.25]
    assert furthest(arrays, by_hand(workers, policy, weights)) < 1e-6
    for other in {"keep", "reset", "average"} - {policy}:
        assert furthest(arrays, by_hand(workers, other, weights)) > 1e-4


def test_momentum_average_and_weights_follow_a_worker_that_a_deadline_cut() -> None:
    cut = worker_of(slow_profile(1), change=stop_at_once)  # 1 of 3 steps: loads 3 and 1
    workers = [worker_of(fast_profile(0)), cut]
    arrays = train(
        workers, local_steps=SameSteps(3), momentum_buffers="average", deadline_seconds=60.0
    )
    for order in cut.orders:
        object.__setattr__(order, "indices", order.indices[: order.batch_size])
        object.__setattr__(order, "local_steps", 1)
    assert furthest(arrays, by_hand(workers, "average", [0.75, 0.25])) < 1e-6


# --- BatchNorm


def test_batchnorm_buffers_are_averaged_with_the_same_weights() -> None:
    ends: list[list[dict[str, np.ndarray]]] = [[], []]

    class Watched(TorchWorker):
        def __call__(self, message: Any, node_id: int) -> Any:
            reply = super().__call__(message, node_id)
            if "arrays" in reply.content.array_records:
                ends[self.profile.partition_id].append(
                    tensors_of(reply.content.array_records["arrays"])
                )
            return reply

    workers = []
    for profile in (fast_profile(0), slow_profile(1)):
        sgd = LocalSGD(make_model(True), data(), momentum=MOMENTUM, weight_decay=DECAY)
        workers.append(Watched(profile, sgd))
    arrays = train(workers, batch_norm=True, local_steps=SystemAwareSteps(3, 1))
    found = tensors_of(arrays)
    first, second = ends[0][-1], ends[1][-1]
    for name in ("1.running_mean", "1.running_var", "1.weight", "0.weight"):
        expected = 0.75 * first[name].astype(np.float64) + 0.25 * second[name]
        assert not np.allclose(first[name], second[name], atol=1e-4), "the test sees nothing"
        assert found[name] == pytest.approx(expected, abs=1e-6)
        assert found[name].dtype == np.float32
    # Nine rounds, and each goes on from the maximum: 3 more every time.
    counter = found["1.num_batches_tracked"]
    assert counter.dtype == np.int64
    assert counter.shape == ()
    assert [int(end["1.num_batches_tracked"]) for end in ends[0]] == list(range(3, 28, 3))
    assert [int(end["1.num_batches_tracked"]) for end in ends[1]] == list(range(1, 26, 3))
    assert int(counter) == 27


# --- the same run twice


def biased(**changes: Any) -> ArrayRecord:
    profiles = (fast_profile(0), fast_profile(1), slow_profile(2))
    workers = [worker_of(profile, True) for profile in profiles]
    own = {"local_steps": 2, "local_steps_slow": 1, "sampler": None}
    return train(workers, batch_norm=True, **own, **changes)


def test_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    first = biased()
    assert same_bits(biased(), first)
    assert not same_bits(biased(seed=3), first)


def test_node_ids_change_no_bit() -> None:
    assert same_bits(biased(ids=range(910, 800, -17)), biased())


# --- the algorithms of the comparison


class PacedWorker(TorchWorker):
    """Reports that a sample takes it so long, epoch by epoch, whatever it really takes."""

    def __init__(self, profile: WorkerProfile, *seconds_per_sample: float) -> None:
        sgd = LocalSGD(make_model(), data(), momentum=MOMENTUM, weight_decay=DECAY)
        super().__init__(profile, sgd)
        self.seconds_per_sample = seconds_per_sample

    def __call__(self, message: Message, node_id: int) -> Message:
        reply = super().__call__(message, node_id)
        if self.seconds_per_sample and message.metadata.message_type == "train":
            order = self.orders[-1]
            pace = self.seconds_per_sample[min(order.epoch, len(self.seconds_per_sample)) - 1]
            metrics = reply.content.metric_records["metrics"]
            metrics["compute-seconds"] = pace * len(order.indices)
        return reply

    @property
    def batches(self) -> list[int]:
        """Its batch size in each epoch."""
        orders = [order for order in self.orders if order.local_steps]
        sizes = {order.epoch: order.batch_size for order in orders}
        assert all(order.batch_size == sizes[order.epoch] for order in orders)
        return list(sizes.values())


def train_by_name(
    algorithm: str, workers: Sequence[TorchWorker], epochs: int = 3, **changes: Any
) -> ArrayRecord:
    """Train as a run with this algorithm does."""
    settings: dict[str, Any] = {
        "batch_size": 4,
        "learning_rate": RATE,
        "decay_epochs": "",
        "momentum": MOMENTUM,
        "local_steps_fast": 3,
        "local_steps_slow": 1,
        "seed": 2,
    }
    config = RunConfig(algorithm=algorithm, **(settings | changes))
    strategy = make_strategy(config, NUM_SAMPLES, len(workers))
    grid = MailGrid({10 + i: worker for i, worker in enumerate(workers)})
    return strategy.fit(grid, ArrayRecord(make_model().state_dict()), epochs=epochs).arrays


# --- synchronous SGD


@pytest.mark.parametrize("algorithm", ["sync-sgd", "sync-sgd-fast-only"])
def test_sync_sgd_is_one_process_with_the_whole_batch(algorithm: str) -> None:
    workers = [PacedWorker(fast_profile(0)), PacedWorker(fast_profile(1))]
    workers.append(PacedWorker(slow_profile(2)))
    arrays = train_by_name(algorithm, workers)
    training = workers if algorithm == "sync-sgd" else workers[:2]
    assert len(rounds_of(training)) == 3 * NUM_SAMPLES // (4 * len(training))
    assert [bool(worker.orders) for worker in workers] == [w in training for w in workers]
    assert furthest(arrays, one_process(rounds_of(training))) < 1e-5


# --- dlb: one step each, shares by the throughput of the last epoch

# Worker 1 becomes faster and then much slower, worker 2 the other way round.
PACES = ([0.1], [0.4, 0.1, 0.8, 0.8], [0.2, 0.3, 0.05, 0.1])


def dlb_workers() -> list[PacedWorker]:
    profiles = (fast_profile(0), fast_profile(1), slow_profile(2))
    return [PacedWorker(p, *pace) for p, pace in zip(profiles, PACES, strict=True)]


def test_dlb_is_one_big_batch_also_when_the_shares_change() -> None:
    workers = dlb_workers()
    arrays = train_by_name("dlb", workers, epochs=4)
    assert len(rounds_of(workers)) == 16  # 4 epochs of 48 samples, 12 in a round
    for orders in rounds_of(workers):
        assert [order.local_steps for order in orders] == [1, 1, 1]
        assert sum(order.batch_size for order in orders) == 12
    # Epoch 1 knows no speed. Then 12 samples in the proportion 1/0.1 : 1/0.4 : 1/0.2,
    # 6.86 : 1.71 : 3.43; the second gets 2, and 10 are shared 2 : 1.
    assert [worker.batches[:2] for worker in workers] == [[4, 7], [4, 2], [4, 3]]
    shares = list(zip(*(worker.batches for worker in workers), strict=True))
    assert len(set(shares)) == 4  # they change every epoch
    assert furthest(arrays, one_process(rounds_of(workers))) < 1e-5


# --- fednova, on a model whose gradients can be followed with a pencil


class OneWeight(nn.Module):
    """Output w times the input; a buffer counts, in floating point, the batches that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.w * inputs


def nova_worker(profile: WorkerProfile, samples: list[int]) -> TorchWorker:
    """Return a worker whose loss is w x; it trains on these of the inputs 1, 2, 3 and 4."""

    def give(order: TrainOrder) -> TrainOrder:
        return dataclasses.replace(order, indices=np.array(samples, np.int32))

    task = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4)
    sgd = LocalSGD(OneWeight(), task, lambda outputs, targets: outputs, momentum=0.9)
    return TorchWorker(profile, sgd, give)


def test_fednova_on_a_linear_model_by_hand() -> None:
    """The loss is w x, so each gradient is the input itself: 1, 2, 3 for one worker, 4 for the
    other.

    The first worker's buffer is 1, then 0.9 + 2 = 2.9, then 2.61 + 3 = 5.61; it moves by
    -0.1 (1 + 2.9 + 5.61) = -0.951. Its three gradients count 2.71, 1.9 and 1 times, 5.61 in all,
    so its mean direction is 9.51 / 5.61 = 1.695187. The other's is 4, counted once.
    On average a gradient counts (5.61 + 1) / 2 = 3.305 times, and the mean direction is
    (1.695187 + 4) / 2 = 2.8475936: w = -0.1 x 3.305 x 2.8475936 = -0.94112968.
    """
    workers = [
        nova_worker(fast_profile(0), [0, 0, 1, 1, 2, 2]),
        nova_worker(slow_profile(1), [3, 3]),
    ]
    config = RunConfig(
        algorithm="fednova",
        learning_rate=0.1,
        decay_epochs="",
        batch_size=2,
        momentum=0.9,
        local_steps_fast=3,
        local_steps_slow=1,
    )
    grid = InProcessGrid({10 + i: worker for i, worker in enumerate(workers)})
    initial = ArrayRecord(OneWeight().state_dict())
    result = make_strategy(config, 8, 2, ["w"]).fit(grid, initial, epochs=1)
    assert [len(worker.orders) for worker in workers] == [1, 1]
    found = tensors_of(result.arrays)
    assert found["w"] == pytest.approx([-0.94112968], abs=1e-6)
    # Buffers by p_i, not by the scales: (3 + 1) / 2. By load it would be 2.5.
    assert found["seen"] == pytest.approx([2.0])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_and_leaves_finite_weights(name: str) -> None:
    workers = [PacedWorker(fast_profile(0)), PacedWorker(fast_profile(1))]
    workers.append(PacedWorker(slow_profile(2)))
    arrays = train_by_name(name, workers, epochs=2)
    assert furthest(arrays, make_model()) > 1e-3
    assert all(np.isfinite(tensor).all() for tensor in tensors_of(arrays).values())


# --- a golden trajectory

GOLDEN = Path(__file__).parent / "golden" / "digits.json"


def digits_trajectory() -> tuple[list[float], ArrayRecord, list[TrainOrder]]:
    task = load_task("digits")
    workers = [
        TorchWorker(profile, LocalSGD(task.model(), task.train, weight_decay=1e-4))
        for profile in (fast_profile(0), slow_profile(1))
    ]
    # So short and gentle that a relative error of 1e-6 in the first weights, more than another
    # CPU makes, moves no loss by more than 3e-5.
    strategy = BiasedLocalSGD(task.num_train, 32, 8, local_steps_slow=4, learning_rate=0.01, seed=0)
    grid = InProcessGrid({10: workers[0], 20: workers[1]})
    ends = train_rounds(strategy, grid, ArrayRecord(task.initial_model(0).state_dict()), epochs=2)
    losses = [end.record.train_loss for end in ends]
    return losses, ends[-1].arrays, [order for worker in workers for order in worker.orders]


def test_golden_losses_of_digits_and_two_runs_in_one_process_bit_for_bit() -> None:
    """WRITE_GOLDEN=1 rewrites the file, after a change that is meant to change the course."""
    losses, arrays, orders = digits_trajectory()
    again, same_arrays, same_orders = digits_trajectory()
    assert again == losses
    assert same_bits(same_arrays, arrays)
    for one, other in zip(orders, same_orders, strict=True):
        assert np.array_equal(one.indices, other.indices)
        assert one.seed == other.seed
    found = {"train_losses": losses, "checksums_of_indices": _checksums(orders)}
    if os.environ.get("WRITE_GOLDEN") == "1":
        GOLDEN.write_text(json.dumps(found, indent=2) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert found["train_losses"] == pytest.approx(golden["train_losses"], rel=1e-4)
    first_epoch = [order.epoch == 1 for order in orders]
    for mine, expected, is_first in zip(
        found["checksums_of_indices"], golden["checksums_of_indices"], first_epoch, strict=True
    ):
        assert mine == expected or not is_first  # later ones depend on rounding in the losses


def _checksums(orders: list[TrainOrder]) -> list[int]:
    return [
        int(np.sum(order.indices.astype(np.int64) * (1 + np.arange(len(order.indices)))))
        for order in orders
    ]
