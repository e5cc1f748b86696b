"""A small model and made-up data."""

import torch
from torch import Tensor, nn

FEATURES, CLASSES, SAMPLES = 64, 10, 48


def make_model() -> nn.Module:
    """Return the model, with the same weights each time; 20,000 of them, and batch norm."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(FEATURES, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, CLASSES)
    )


def load_data(partition: int) -> tuple[Tensor, Tensor]:
    """Return a partition's inputs and targets."""
    generator = torch.Generator().manual_seed(100 + partition)
    size = SAMPLES + 8 * partition
    inputs = torch.randn(size, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (size,), generator=generator)
