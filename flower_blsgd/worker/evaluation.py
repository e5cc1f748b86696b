"""Loss and metric of a model on a test set, or on a slice of it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..protocol import EvaluateReport
from .batches import (
    HostSamples,
    IndexedSamples,
    Samples,
    batch_source,
    bytes_to_move,
    num_samples,
    tensor_parts,
)

PerSample = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) -> one value per sample, shape (batch_size,)."""


def evaluate_sums(
    model: nn.Module,
    samples: Samples,
    loss: PerSample,
    metric: PerSample,
    device: str | torch.device = "cpu",
    first: int = 0,
    last: int | None = None,
    batch_size: int = 1024,
) -> EvaluateReport:
    """Return loss and metric added up in float64 over the samples [first, last), in eval mode.

    Parameters
    ----------
    model : torch.nn.Module
        Left in eval mode.
    samples : tuple of tensors, TensorDataset or map-style Dataset
        The test set.
    loss, metric : callable
        ``(outputs, targets) -> values`` of shape (batch_size,).
    device : str or torch.device (default: "cpu")
        Where to compute.
    first, last : int
        The slice, by default all of it. Only its samples are moved to the device; what would take
        more than half of its free memory is moved batch by batch.
    batch_size : int (default: 1024)
        Samples that are computed at once.
    """
    last = num_samples(samples) if last is None else last
    device = torch.device(device)
    source = batch_source(_between(samples, first, last, device), device)
    numbers = torch.arange(last - first, device=device if source.on_device else None)
    model = model.to(device).eval()
    loss_sum = metric_sum = 0.0
    with torch.inference_mode():
        for indices in torch.split(numbers, batch_size):
            inputs, targets = source.batch(indices)
            outputs = model(inputs)
            # On the CPU, since not every accelerator has float64.
            loss_sum += float(loss(outputs, targets).cpu().double().sum())
            metric_sum += float(metric(outputs, targets).cpu().double().sum())
    return EvaluateReport(first, last, loss_sum, metric_sum)


def _between(samples: Samples, first: int, last: int, device: torch.device) -> Samples:
    """Return the slice, so that the device need not take more than that."""
    if isinstance(samples, IndexedSamples):
        whole = samples.samples
        parts = tensor_parts(whole)
        if parts is not None and bytes_to_move(parts, device):
            whole = HostSamples(parts)
        return IndexedSamples(whole, samples.indices[first:last])
    parts = tensor_parts(samples)
    if parts is None:
        return IndexedSamples(samples, np.arange(first, last))
    views = [part[first:last] for part in parts]
    return HostSamples(views) if isinstance(samples, HostSamples) else views
