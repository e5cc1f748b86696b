"""A small network with its data, and workers that train it, for tests that compare bits."""

from typing import Any

import torch
from torch import Tensor, nn

from flower_blsgd import LocalSGD, Task
from flower_blsgd.protocol import WorkerProfile

from .in_process_grid import TorchWorker

NUM_SAMPLES = 48
MOMENTUM, DECAY = 0.9, 1e-2


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(NUM_SAMPLES, 5, generator=generator)
    return inputs, (inputs.sum(dim=1) > 0).long() + (inputs[:, 0] > 1).long()


def make_model(batch_norm: bool = False) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        norm = nn.BatchNorm1d(7) if batch_norm else nn.Identity()
        return nn.Sequential(nn.Linear(5, 7), norm, nn.Tanh(), nn.Linear(7, 3))


def worker_of(profile: WorkerProfile, batch_norm: bool = False, **arguments: Any) -> TorchWorker:
    sgd = LocalSGD(make_model(batch_norm), data(), momentum=MOMENTUM, weight_decay=DECAY)
    return TorchWorker(profile, sgd, **arguments)


def points_task(num_train: int, num_test: int, features: int = 4, **changes: Any) -> Task:
    """Return a task of random points in two classes, whose functions are nobody's module's."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(num_train + num_test, features, generator=generator)
    labels = (points[:, 0] > 0).long()
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(features, 2),
        "train": (points[:num_train], labels[:num_train]),
        "test": (points[num_train:], labels[num_train:]),
    }
    return Task(**(parts | changes))
