"""Loss and metric of a model on a test set."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Samples, batch_source

_BATCH_SIZE = 1024


def evaluate(
    model: nn.Module,
    samples: Samples,
    loss: Callable[[Any, Tensor], Tensor],
    metric: Callable[[Any, Tensor], Tensor],
    device: str | torch.device = "cpu",
) -> tuple[float, float]:
    """Return mean loss and mean metric over all samples, in eval mode.

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
    """
    device = torch.device(device)
    source = batch_source(samples, device)
    model = model.to(device).eval()
    loss_sum = metric_sum = 0.0
    with torch.inference_mode():
        for indices in torch.split(torch.arange(len(source), device=device), _BATCH_SIZE):
            inputs, targets = source.batch(indices)
            outputs = model(inputs)
            # On the CPU, since not every accelerator has float64.
            loss_sum += float(loss(outputs, targets).cpu().double().sum())
            metric_sum += float(metric(outputs, targets).cpu().double().sum())
    return loss_sum / len(source), metric_sum / len(source)
