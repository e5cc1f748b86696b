"""Loss and metric of a model on a test set or a slice of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..devices.worker_spec import Precision
from ..protocol import EvaluateReport as EvaluateReport  # noqa: PLC0414
from .batches import (
    BatchSource,
    Collate,
    Samples,
    channels_last_images,
    inputs_and_targets,
    map_tensors,
    num_samples,
)
from .step import SampleLoss, autocast, takes_model, widened

_ON_CPU = 64


def evaluate_sums(
    model: nn.Module,
    samples: Samples,
    loss: SampleLoss,
    metric: SampleLoss | None,
    device: str | torch.device = "cpu",
    part: range | None = None,
    batch_size: int = 1024,
    collate: Collate | None = None,
    metric_name: str = "accuracy",
    *,
    precision: Precision = "float32",
    channels_last: bool = False,
    loader_workers: int = 0,
) -> EvaluateReport:
    """Return float64 sums of loss and metric over each batch of the test set, in eval mode.

    A metric may return a dict of named values; otherwise they are named `metric_name`. Without a
    metric, the report has only the loss. The model is left in eval mode.

    Samples are copied to the device batch by batch. A CPU computes at most 64 at a time, because
    larger batches do not fit into its caches and take up to three times as long, and in float32,
    because most CPUs emulate 16 bits slowly. `part` is a slice of the test set.

    The device is waited for once, at the end. Samples of a map-style Dataset are read by at most
    `loader_workers` processes, which end with the slice.
    """
    device = torch.device(device)
    on_cpu = device.type == "cpu"
    part = range(num_samples(samples)) if part is None else part
    indices = torch.arange(part.start, part.stop)
    most = _ON_CPU if on_cpu else batch_size
    parts = [torch.split(some, most) for some in torch.split(indices, batch_size)]
    sizes = [len(part) for some in parts for part in some]
    processes = min(loader_workers, len(sizes) - 1)
    source = BatchSource(samples, device, move=False, collate=collate, loader_workers=processes)
    model = model.to(device).eval()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,unused-ignore]
    summed_on = device if device.type in ("cpu", "cuda") else "cpu"  # others may have no float64
    names: list[str] = []
    sums: list[Tensor] = []
    inside: Precision = "float32" if on_cpu else precision
    with torch.inference_mode():
        for read in source.batches(indices, sizes, seed_step=0):
            batch = map_tensors(read, channels_last_images) if channels_last else read
            functions = [loss, metric] if metric else [loss]
            losses, *values = sample_values(model, batch, inside, device, *functions)
            named = named_values(values[0], metric_name) if values else {}
            names = names or list(named)
            if names != list(named):
                raise ValueError(
                    f"the metric returned values named {list(named)}, but {names} before"
                )
            sums += [value.to(summed_on).double().sum() for value in (losses, *named.values())]
        rows = torch.stack(sums).view(len(sizes), -1).cpu()
    batches = torch.tensor([number for number, some in enumerate(parts) for _ in some])
    totals = rows.new_zeros(len(parts), rows.shape[1]).index_add(0, batches, rows)
    metric_sums = totals[:, 1:].flatten().tolist()
    return EvaluateReport(part.start, part.stop, totals[:, 0].tolist(), metric_sums, names)


def sample_values(
    model: nn.Module,
    batch: Any,
    precision: Precision,
    device: torch.device,
    *functions: SampleLoss,
) -> list[Any]:
    """Return the values of losses and metrics on one batch, with one forward pass for all.

    Functions that take the model call it themselves, in this precision. The others compute in the
    dtype of the outputs, which become float32: numpy, which a metric may use, has no bfloat16.
    """
    called: list[Any] = []
    values = []
    for function in functions:
        if takes_model(function):
            with autocast(precision, device):
                values.append(function(model, batch))
            continue
        inputs, targets = inputs_and_targets(batch)
        if not called:
            with autocast(precision, device):
                called.append(model(inputs))
            if isinstance(called[0], Tensor):
                called[0] = widened(called[0])
        values.append(function(called[0], targets))
    return values


def named_values(values: Any, name: str) -> dict[str, Tensor]:
    """Return the values of a metric by name."""
    return dict(values) if isinstance(values, Mapping) else {name: values}
