"""A small regression task whose metric, the root mean squared error, is to be minimized."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flower_blsgd import Task, mean_squared_error

TRAIN, TEST = 400, 100


def task() -> Task:
    """Return data and model: a noisy sine of one input."""
    generator = torch.Generator().manual_seed(0)
    inputs = 4 * torch.rand(TRAIN + TEST, 1, generator=generator) - 2
    targets = (2 * inputs).sin() + 0.1 * torch.randn(inputs.shape, generator=generator)
    return Task(
        model=network,
        train=(inputs[:TRAIN], targets[:TRAIN]),
        test=(inputs[TRAIN:], targets[TRAIN:]),
        loss=mean_squared_error,
        metric=squared_error,
        metric_name="rmse",
        metric_mode="min",
        metric_from_sums=root_of_mean,
    )


def network() -> nn.Module:
    """Return a new model."""
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def squared_error(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the squared error of every sample, by the name of the metric."""
    return {"rmse": mean_squared_error(outputs, targets)}


def root_of_mean(sums: Mapping[str, float], num_samples: int) -> float:
    """Return the root of the mean over the test set."""
    return float((sums["rmse"] / num_samples) ** 0.5)
