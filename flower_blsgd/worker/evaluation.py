"""Loss and metric of a model on a test set or a slice of it."""

import torch
from torch import Tensor, nn

from ..protocol import EvaluateReport as EvaluateReport  # noqa: PLC0414
from .batches import BatchSource, Samples
from .step import SampleLoss

_ON_CPU = 64


def evaluate_sums(
    model: nn.Module,
    samples: Samples,
    loss: SampleLoss,
    metric: SampleLoss,
    device: str | torch.device = "cpu",
    first: int = 0,
    last: int | None = None,
    batch_size: int = 1024,
) -> EvaluateReport:
    """Return float64 sums of loss and metric over each batch of [first, last), in eval mode.

    Parameters
    ----------
    model : torch.nn.Module
        Left in eval mode.
    samples : tuple of tensors, TensorDataset or map-style Dataset
        The test set. It is not moved; its samples are copied to the device batch by batch.
    loss, metric : callable
        ``(outputs, targets) -> values`` of shape (batch_size,).
    device : str or torch.device (default: "cpu")
        Device to compute on.
    first, last : int
        The slice; by default the whole test set.
    batch_size : int (default: 1024)
        Samples per batch. A CPU computes at most 64 at a time, because larger batches do not fit
        into its caches and take up to three times as long.
    """
    device = torch.device(device)
    source = BatchSource(samples, device, move=False)
    last = len(source) if last is None else last
    model = model.to(device).eval()
    loss_sums, metric_sums, in_range = [], [], True
    with torch.inference_mode():
        for indices in torch.split(torch.arange(first, last), batch_size):
            loss_sum, metric_sum = 0.0, 0.0
            for part in torch.split(indices, _ON_CPU if device.type == "cpu" else batch_size):
                inputs, targets = source.batch(part)
                outputs = model(inputs)
                # On the CPU, because not every accelerator supports float64.
                loss_sum += float(loss(outputs, targets).cpu().double().sum())
                values = metric(outputs, targets).cpu().double()
                metric_sum += float(values.sum())
                in_range = in_range and are_in_range(values)
            loss_sums.append(loss_sum)
            metric_sums.append(metric_sum)
    return EvaluateReport(first, last, loss_sums, metric_sums, in_range)


def are_in_range(values: Tensor) -> bool:
    """Return whether all values of a metric are in [0, 1], like an accuracy; nan counts as in."""
    return not bool(((values < 0) | (values > 1)).any())
