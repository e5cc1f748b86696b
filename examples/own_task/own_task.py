"""A custom task: classify points of two spirals."""

import math

import torch
from torch import Tensor, nn

from flower_blsgd import Task

TRAIN, TEST = 2_000, 500


def task() -> Task:
    """Return data and model; called in every process that needs them."""
    points, labels = spirals(TRAIN + TEST, seed=0)
    return Task(
        model=network,
        train=(points[:TRAIN], labels[:TRAIN]),
        test=(points[TRAIN:], labels[TRAIN:]),
        augment=jitter,
    )


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points of shape (count, 2) and their class, 0 or 1; equal in every process."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator)
    turn = 2.5 * math.pi * torch.rand(count, generator=generator).sqrt()
    angle = turn + math.pi * labels
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * (turn / 4)[:, None]
    return points + 0.05 * torch.randn(count, 2, generator=generator), labels


def network() -> nn.Module:
    """Return a new model."""
    return nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


def jitter(points: Tensor, generator: torch.Generator) -> Tensor:
    """Move the points of a training batch a little."""
    noise = torch.randn(points.shape, generator=generator, device=points.device)
    return points + 0.02 * noise
