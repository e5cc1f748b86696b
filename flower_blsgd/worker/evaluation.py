"""Loss and metric of a model on a test set or a slice of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..protocol import EvaluateReport as EvaluateReport  # noqa: PLC0414
from .batches import BatchSource, Collate, Samples, inputs_and_targets
from .step import SampleLoss, takes_model

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
    collate: Collate | None = None,
    metric_name: str = "accuracy",
) -> EvaluateReport:
    """Return float64 sums of loss and metric over each batch of [first, last), in eval mode.

    `loss` and `metric` are ``(outputs, targets)`` or ``(model, batch) -> values`` of shape
    (batch_size,). The outputs of a batch are computed once for both. A metric may return a dict of
    named values; otherwise they are named `metric_name`. The model is left in eval mode.

    The test set is not moved; its samples are copied to the device batch by batch. A CPU computes
    at most 64 samples at a time, because larger batches do not fit into its caches and take up to
    three times as long. Without `last`, the slice ends with the test set.
    """
    device = torch.device(device)
    source = BatchSource(samples, device, move=False, collate=collate)
    last = len(source) if last is None else last
    model = model.to(device).eval()
    loss_sums: list[float] = []
    metric_sums: list[float] = []
    names: list[str] = []
    with torch.inference_mode():
        for indices in torch.split(torch.arange(first, last), batch_size):
            loss_sum, sums = 0.0, dict.fromkeys(names, 0.0)
            for part in torch.split(indices, _ON_CPU if device.type == "cpu" else batch_size):
                losses, values = sample_values(model, source.batch(part), loss, metric)
                # On the CPU, because not every accelerator supports float64.
                loss_sum += float(losses.cpu().double().sum())
                for name, value in named_values(values, metric_name).items():
                    sums[name] = sums.get(name, 0.0) + float(value.cpu().double().sum())
            names = names or list(sums)
            if names != list(sums):
                raise ValueError(
                    f"the metric returned values named {list(sums)}, but {names} before"
                )
            loss_sums.append(loss_sum)
            metric_sums += sums.values()
    return EvaluateReport(first, last, loss_sums, metric_sums, names)


def sample_values(model: nn.Module, batch: Any, *functions: SampleLoss) -> list[Any]:
    """Return the values of losses and metrics on one batch, with one forward pass for all.

    Functions that take the model call it themselves.
    """
    called: list[Any] = []
    values = []
    for function in functions:
        if takes_model(function):
            values.append(function(model, batch))
            continue
        inputs, targets = inputs_and_targets(batch)
        if not called:
            called.append(model(inputs))
        values.append(function(called[0], targets))
    return values


def named_values(values: Any, name: str) -> dict[str, Tensor]:
    """Return the values of a metric by name."""
    return dict(values) if isinstance(values, Mapping) else {name: values}
