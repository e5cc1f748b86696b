"""Loss and metric of a model on a test set, or on a slice of it."""

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
    """Return loss and metric added up in float64 over each batch of [first, last), in eval mode.

    Parameters
    ----------
    model : torch.nn.Module
        Left in eval mode.
    samples : tuple of tensors, TensorDataset or map-style Dataset
        The test set. It stays where it is: its samples move to the device batch by batch.
    loss, metric : callable
        ``(outputs, targets) -> values`` of shape (batch_size,).
    device : str or torch.device (default: "cpu")
        Where to compute.
    first, last : int
        The slice, by default all of it.
    batch_size : int (default: 1024)
        Samples that are computed at once; on a CPU at most 64 of them, since larger batches do not
        fit into its caches and take up to three times as long.
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
                # On the CPU, since not every accelerator has float64.
                loss_sum += float(loss(outputs, targets).cpu().double().sum())
                values = metric(outputs, targets).cpu().double()
                metric_sum += float(values.sum())
                in_range = in_range and are_in_range(values)
            loss_sums.append(loss_sum)
            metric_sums.append(metric_sum)
    return EvaluateReport(first, last, loss_sums, metric_sums, in_range)


def are_in_range(values: Tensor) -> bool:
    """Return whether all values of a metric are in [0, 1], as of an accuracy; nan counts as in."""
    return not bool(((values < 0) | (values > 1)).any())
