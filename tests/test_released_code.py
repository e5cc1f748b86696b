"""`biased-local-sgd-released` against a transcription of what the authors' released code does."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flower_blsgd import LocalSGD
from flower_blsgd.algorithm.randomness import generator
from flower_blsgd.algorithm.sampling import draw_samples
from flower_blsgd.config import RunConfig
from flower_blsgd.parts import make_strategy
from flower_blsgd.tasks import load_task

from .in_process_grid import InProcessGrid, TorchWorker, fast_profile, slow_profile, tensors_of

BATCH, FAST_STEPS, SLOW_STEPS, EPOCHS = 32, 4, 1, 3
RATE, DECAY, SEED = 0.05, 1e-4, 5

pytestmark = pytest.mark.usefixtures("one_thread")

Draw = tuple[np.ndarray, np.random.Generator, np.ndarray]


# --- the released code, one slow and one fast worker, written without ours


class Released:
    """Trains a copy of the model for each of the workers, and averages them equally.

    Each draw is the list of candidates, what shuffles those that are taken, and the fast worker's
    samples.
    """

    def __init__(self, model: nn.Module, train: tuple[Tensor, Tensor]) -> None:
        self.inputs, self.targets = train
        self.num_samples = len(self.targets)
        self.score = np.full(self.num_samples, np.inf)
        self.rounds = self.num_samples // (BATCH * 2 * FAST_STEPS)
        self.shuffle_rounds = self.num_samples // (BATCH * (SLOW_STEPS + FAST_STEPS))
        self.num_slow = self.shuffle_rounds * SLOW_STEPS * BATCH
        self.num_fast = self.shuffle_rounds * FAST_STEPS * BATCH
        self.models = [copy.deepcopy(model) for _ in range(2)]
        self.optimizers = [
            torch.optim.SGD(m.parameters(), lr=RATE, momentum=0.9, weight_decay=DECAY)
            for m in self.models
        ]
        self.batches: list[list[list[np.ndarray]]] = [[], []]  # of each worker by round

    def train(self, draws: Iterator[Draw]) -> None:
        count = 0
        schedulers = [torch.optim.lr_scheduler.MultiStepLR(o, [1, 2]) for o in self.optimizers]
        for _ in range(EPOCHS):
            for _ in range(self.rounds):
                if count % self.shuffle_rounds == 0:
                    loaders = [self.loader(list_) for list_ in self.biased_sample(*next(draws))]
                for worker, steps in enumerate((SLOW_STEPS, FAST_STEPS)):
                    self.batches[worker].append([next(loaders[worker]) for _ in range(steps)])
                    for batch in self.batches[worker][-1]:
                        self.step(worker, batch)
                self.average()
                count += 1
            for scheduler in schedulers:
                scheduler.step()

    def biased_sample(
        self, candidates: np.ndarray, shuffle: np.random.Generator, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        topk = candidates[np.argsort(self.score[candidates], kind="stable")[-self.num_slow :]]
        shuffle.shuffle(topk)
        return topk, uniform

    def loader(self, indices: np.ndarray) -> Iterator[np.ndarray]:
        return iter(np.split(indices, len(indices) // BATCH))

    def step(self, worker: int, batch: np.ndarray) -> None:
        model, chosen = self.models[worker].train(), torch.from_numpy(batch.astype(np.int64))
        outputs = model(self.inputs[chosen])
        losses = nn.functional.cross_entropy(outputs, self.targets[chosen], reduction="none")
        self.optimizers[worker].zero_grad()
        losses.mean().backward()
        self.optimizers[worker].step()
        self.score[batch] = losses.detach().float().numpy()

    def average(self) -> None:
        slow, fast = (model.state_dict() for model in self.models)
        mean = {name: (slow[name] + fast[name]) / 2 for name in slow}
        for model in self.models:
            model.load_state_dict(mean)


def draws(released: Released) -> Iterator[Draw]:
    """Yield the draws that our run makes: they are told apart by the samples before them."""
    per_draw, none = released.num_slow + released.num_fast, np.zeros(released.num_samples)
    for before in range(0, 10**9, per_draw):
        slow, fast = (generator(SEED, f"{tier}-samples", before) for tier in ("slow", "fast"))
        candidates = draw_samples(none, 4 * released.num_slow, 0.0, slow)
        yield candidates, slow, draw_samples(none, released.num_fast, 0.0, fast)


# --- ours


def test_preset_has_the_samples_and_the_model_of_the_released_code() -> None:
    """Epochs of 5 rounds, choices for 8: the second is made in epoch 2 and goes on into the third.

    So with the same draws; how they are made is tested with the sampler.
    """
    task = load_task("digits", model="cnn-batchnorm")
    # In float64: these rounds magnify the rounding of float32, which differs between processors.
    train: Any = (task.train[0].double(), task.train[1])  # type: ignore[index]
    model = task.initial_model(0).double()
    released = Released(model, train)
    assert (released.rounds, released.shuffle_rounds, 4 * released.num_slow) == (5, 8, 1024)
    released.train(draws(released))
    config = RunConfig(
        algorithm="biased-local-sgd-released",
        batch_size=BATCH,
        local_steps_fast=FAST_STEPS,
        local_steps_slow=SLOW_STEPS,
        learning_rate=RATE,
        decay_epochs="1, 2",
        weight_decay=DECAY,
        seed=SEED,
    )
    workers = [
        TorchWorker(p, LocalSGD(task.model().double(), train, weight_decay=DECAY))
        for p in (fast_profile(0), slow_profile(1))
    ]
    strategy = make_strategy(config, task.num_train, 2)
    grid = InProcessGrid({10 + i: worker for i, worker in enumerate(workers)})
    found = strategy.fit(grid, ArrayRecord(model.state_dict()), epochs=EPOCHS).arrays
    for worker, batches in zip(workers[::-1], released.batches, strict=True):
        assert len(worker.orders) == 5 * EPOCHS
        for order, expected in zip(worker.orders, batches, strict=True):
            assert order.indices.tolist() == np.concatenate(expected).tolist()
    tensors, moved = tensors_of(found), 0.0
    for name, tensor in released.models[0].state_dict().items():
        if (
            tensor.is_floating_point()
        ):  # counters of batches are averaged there, ours is the maximum
            np.testing.assert_allclose(tensors[name], tensor.numpy(), atol=1e-6)
            moved = max(moved, float((tensor - model.state_dict()[name]).abs().max()))
    assert moved > 0.1
