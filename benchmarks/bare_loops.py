"""Training loops without this library: what anybody writes, and the best that we can write."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from flower_blsgd.devices.worker_spec import Precision
from flower_blsgd.worker.step import autocast

from .models import Data, Workload

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 1e-4

Turn = Callable[[np.ndarray], None]
"""Train on these samples, in batches, and wait until it is done."""


def bare_loop(
    workload: Workload,
    data: Data,
    device: torch.device,
    batch_size: int,
    precision: Precision = "float32",
    *,
    channels_last: bool = False,
    compiled: bool = False,
) -> Turn:
    """Return the loop that anybody would write by hand, with the data on the device.

    A `compiled` one uses torch's CUDA graphs and a fused optimizer.
    """
    model = workload.model().to(device).train()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = make_optimizer(workload, model, fused=compiled or None)
    if compiled:
        model = torch.compile(model, mode="reduce-overhead")
    step = _step(workload, data, device, model, optimizer, precision, channels_last)
    generator = torch.Generator(device)

    def turn(indices: np.ndarray) -> None:
        for batch in torch.from_numpy(indices.astype(np.int64)).to(device).split(batch_size):
            step(batch, generator)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return turn


def make_optimizer(
    workload: Workload, model: nn.Module, fused: bool | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer that `LocalSGD` has with the same settings."""
    if workload.optimizer == "adamw":
        return torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=fused
        )
    return torch.optim.SGD(
        model.parameters(),
        lr=LEARNING_RATE,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        fused=fused,
    )


def _step(
    workload: Workload,
    data: Data,
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    channels_last: bool,
) -> Callable[[Tensor, torch.Generator], None]:
    samples, labels = (part.to(device) for part in data)
    loss = nn.CrossEntropyLoss()
    augment = workload.augment

    def step(batch: Tensor, generator: torch.Generator) -> None:
        inputs = samples[batch]
        if augment is not None:
            inputs = augment(inputs, generator)
        if channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with autocast(precision, device):
            value = loss(model(inputs), labels[batch])
        value.backward()
        optimizer.step()

    return step
