"""Training loops without this library: what anybody writes, and the best that we can write."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flower_blsgd.grids.worker_spec import Precision
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
) -> Turn:
    """Return the loop that anybody would write by hand, with the data on the device."""
    model = workload.model().to(device).train()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = make_optimizer(workload, model)
    step = _step(workload, data, device, model, optimizer, precision, channels_last)
    generator = torch.Generator(device)

    def turn(indices: np.ndarray) -> None:
        for batch in torch.from_numpy(indices.astype(np.int64)).to(device).split(batch_size):
            step(batch, generator)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return turn


def graph_loop(
    workload: Workload,
    data: Data,
    device: torch.device,
    batch_size: int,
    precision: Precision = "float32",
) -> Turn:
    """Return a loop that replays the step as a CUDA graph, written by hand for this one case."""
    model = workload.model().to(device).train().to(memory_format=torch.channels_last)
    optimizer = make_optimizer(workload, model, fused=True)
    step = _step(workload, data, device, model, optimizer, precision, True)
    generator = torch.Generator(device)
    static = torch.arange(batch_size, device=device)
    side: Any = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step(static, generator)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    for group in optimizer.param_groups:
        group["capturable"] = True
    with torch.cuda.graph(graph):
        step(static, generator)

    def turn(indices: np.ndarray) -> None:
        for batch in torch.from_numpy(indices.astype(np.int64)).to(device).split(batch_size):
            static.copy_(batch)
            graph.replay()
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
