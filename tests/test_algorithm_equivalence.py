"""The algorithms of the comparison against what they are said to be, in numbers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor, nn

from flower_blsgd import LocalSGD
from flower_blsgd.algorithm.catalog import ALGORITHMS
from flower_blsgd.config import RunConfig
from flower_blsgd.protocol import TrainOrder, WorkerProfile
from flower_blsgd.run import make_strategy

from .in_process_grid import InProcessGrid, TorchWorker, fast_profile, slow_profile, tensors_of

NUM_SAMPLES = 48
RATE, MOMENTUM, DECAY = 0.05, 0.9, 1e-2


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(NUM_SAMPLES, 5, generator=generator)
    return inputs, (inputs.sum(dim=1) > 0).long() + (inputs[:, 0] > 1).long()


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


class PacedWorker(TorchWorker):
    """Says that a sample takes it so long, epoch by epoch, whatever it really takes."""

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
        sizes = {order.epoch: order.batch_size for order in self.orders}
        assert all(order.batch_size == sizes[order.epoch] for order in self.orders)
        return list(sizes.values())


def train(
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
    grid = InProcessGrid({10 + i: worker for i, worker in enumerate(workers)})
    return strategy.fit(grid, ArrayRecord(make_model().state_dict()), epochs=epochs).arrays


def one_process(orders_of_rounds: Sequence[Sequence[TrainOrder]]) -> nn.Module:
    """Train on everybody's samples of each round as one batch, with torch alone."""
    inputs, targets = data()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    for orders in orders_of_rounds:
        chosen = torch.from_numpy(np.concatenate([o.indices for o in orders]).astype(np.int64))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    return model


def rounds_of(workers: Sequence[TorchWorker]) -> list[tuple[TrainOrder, ...]]:
    return list(zip(*(worker.orders for worker in workers), strict=True))


def furthest(arrays: ArrayRecord, model: nn.Module) -> float:
    expected, found = model.state_dict(), tensors_of(arrays)
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name].numpy()).max()) for name in found)


# --- synchronous SGD


@pytest.mark.parametrize("algorithm", ["sync-sgd", "sync-sgd-fast-only"])
def test_sync_sgd_is_one_process_with_the_whole_batch(algorithm: str) -> None:
    workers = [PacedWorker(fast_profile(0)), PacedWorker(fast_profile(1))]
    workers.append(PacedWorker(slow_profile(2)))
    arrays = train(algorithm, workers)
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
    arrays = train("dlb", workers, epochs=4)
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


def test_dlb_with_momentum_kept_is_no_big_batch() -> None:
    workers = dlb_workers()
    arrays = train("dlb", workers, epochs=4, momentum_buffers="keep")
    assert len(rounds_of(workers)) == 16
    assert furthest(arrays, one_process(rounds_of(workers))) > 1e-3


def test_dlb_with_equal_weights_is_no_big_batch() -> None:
    workers = dlb_workers()
    arrays = train("dlb", workers, epochs=4, weights="equal")
    assert furthest(arrays, one_process(rounds_of(workers))) > 1e-3


def test_dlb_shares_follow_the_moving_average_of_the_last_epoch() -> None:
    """Four rounds an epoch at 0.4 of the newest: of a change, 1 - 0.6^4 is in."""
    workers = dlb_workers()
    train("dlb", workers, epochs=3)
    left = 0.6**4
    seconds = [0.1, 0.1 + left * (0.4 - 0.1), 0.3 + left * (0.2 - 0.3)]
    speeds = [1 / s for s in seconds]
    ideal = [12 * speed / sum(speeds) for speed in speeds]
    assert ideal == pytest.approx([5.80, 4.18, 2.02], abs=0.01)
    batches = [worker.batches[2] for worker in workers]
    assert batches == [6, 4, 2]


# --- fednova, on models whose gradients can be followed with a pencil


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


def nova_worker(
    profile: WorkerProfile, inputs: Tensor, quadratic: bool, samples: list[int] | None = None
) -> TorchWorker:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square() / 2 if quadratic else outputs

    def give(order: TrainOrder) -> TrainOrder:
        if samples is None:
            return order
        return dataclasses.replace(order, indices=np.array(samples, np.int32))

    sgd = LocalSGD(OneWeight(), (inputs, torch.ones(len(inputs))), loss, momentum=0.9)
    return TorchWorker(profile, sgd, give)


def nova(workers: Sequence[TorchWorker], rounds: int, **changes: Any) -> dict[str, np.ndarray]:
    settings: dict[str, Any] = {
        "learning_rate": 0.1,
        "decay_epochs": "",
        "batch_size": 2,
        "momentum": 0.9,
    }
    settings |= {"local_steps_fast": 3, "local_steps_slow": 1}
    config = RunConfig(algorithm="fednova", **(settings | changes))
    samples = 2 * (config.local_steps_fast + int(config.local_steps_slow)) * rounds
    strategy = make_strategy(config, samples, len(workers), ["w"])
    grid = InProcessGrid({10 + i: worker for i, worker in enumerate(workers)})
    initial = ArrayRecord(OneWeight().state_dict())
    result = strategy.fit(grid, initial, epochs=1)
    assert len(workers[0].orders) == rounds
    return tensors_of(result.arrays)


def test_fednova_on_a_linear_model_by_hand() -> None:
    """The loss is w x, so each gradient is the input itself: 1, 2, 3 for one worker, 4 for the
    other.

    The first worker's buffer is 1, then 0.9 + 2 = 2.9, then 2.61 + 3 = 5.61; it moves by
    -0.1 (1 + 2.9 + 5.61) = -0.951. Its three gradients count 2.71, 1.9 and 1 times, 5.61 in all,
    so its mean direction is 9.51 / 5.61 = 1.695187. The other's is 4, counted once.
    On average a gradient counts (5.61 + 1) / 2 = 3.305 times, and the mean direction is
    (1.695187 + 4) / 2 = 2.8475936: w = -0.1 x 3.305 x 2.8475936 = -0.94112968.
    """
    inputs = torch.tensor([1.0, 2.0, 3.0, 4.0])
    workers = [
        nova_worker(fast_profile(0), inputs, False, [0, 0, 1, 1, 2, 2]),
        nova_worker(slow_profile(1), inputs, False, [3, 3]),
    ]
    found = nova(workers, 1)
    assert found["w"] == pytest.approx([-0.94112968], abs=1e-6)
    # Buffers by p_i, not by the scales: (3 + 1) / 2. By load it would be 2.5.
    assert found["seen"] == pytest.approx([2.0])


def test_fednova_on_a_quadratic_by_hand_over_two_rounds() -> None:
    """The loss is (w - 1)^2 / 2, the gradient w - 1, the rate 0.1; w begins at 0.

    Round 1. First worker: -1, buffer -1, w 0.1; -0.9, buffer -1.8, w 0.28; -0.72, buffer -2.34,
    w 0.514. The other: w 0.1. Scales 3.305 / 2 / 5.61 = 0.29456328 and 3.305 / 2 = 1.6525:
    w = 0.29456328 x 0.514 + 1.6525 x 0.1 = 0.31665553.
    Round 2, from zero momentum: everything is linear in 1 - w, so what is left of it is again
    (1 - 0.31665553): 1 - w = 0.68334447^2 = 0.46695967.
    """
    workers = [
        nova_worker(fast_profile(0), torch.ones(16), True),
        nova_worker(slow_profile(1), torch.ones(16), True),
    ]
    found = nova(workers, 2)
    assert found["w"] == pytest.approx([1 - 0.46695967], abs=1e-6)
    assert found["seen"] == pytest.approx([4.0])  # (2 + 3 + 2 + 1) / 2


def test_fednova_with_equal_steps_is_the_plain_mean() -> None:
    workers = [
        nova_worker(fast_profile(0), torch.ones(16), True),
        nova_worker(slow_profile(1), torch.ones(16), True),
    ]
    assert nova(workers, 1, local_steps_slow=3)["w"] == pytest.approx([0.514], abs=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_and_leaves_finite_weights(name: str) -> None:
    workers = [PacedWorker(fast_profile(0)), PacedWorker(fast_profile(1))]
    workers.append(PacedWorker(slow_profile(2)))
    arrays = train(name, workers, epochs=2)
    assert furthest(arrays, make_model()) > 1e-3
    assert all(np.isfinite(tensor).all() for tensor in tensors_of(arrays).values())
