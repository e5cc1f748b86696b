"""Loss and metric of a model on a test set, or on a slice; BatchNorm statistics of an average."""

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from ..algorithm.sampling import derived_seed, generator
from ..protocol import EvaluateReport as EvaluateReport  # noqa: PLC0414
from .batches import BatchSource, Samples
from .step import Augment, SampleLoss


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
    """Return loss and metric added up in float64 over the samples [first, last), in eval mode.

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
        Samples that are computed at once.
    """
    device = torch.device(device)
    source = BatchSource(samples, device, move=False)
    last = len(source) if last is None else last
    model = model.to(device).eval()
    loss_sum = metric_sum = 0.0
    with torch.inference_mode():
        for indices in torch.split(torch.arange(first, last), batch_size):
            inputs, targets = source.batch(indices)
            outputs = model(inputs)
            # On the CPU, since not every accelerator has float64.
            loss_sum += float(loss(outputs, targets).cpu().double().sum())
            metric_sum += float(metric(outputs, targets).cpu().double().sum())
    return EvaluateReport(first, last, loss_sum, metric_sum)


def recompute_batch_norm(
    model: nn.Module,
    samples: Samples,
    device: str | torch.device = "cpu",
    *,
    augment: Augment | None = None,
    num_samples: int = 4096,
    batch_size: int = 256,
    seed: int = 0,
) -> None:
    """Recompute the running statistics of BatchNorm, in place, by a pass over training samples.

    For an average of models, whose statistics belong to other weights. The samples are drawn at
    random; the means and variances of the batches are averaged; counters stay.

    Parameters
    ----------
    model : torch.nn.Module
        Moves to the device; its mode stays.
    samples : tuple of tensors, TensorDataset or map-style Dataset
        The training set.
    device : str or torch.device (default: "cpu")
        Where to compute.
    augment : callable, optional
        That of the training. A model that was trained on augmented samples needs it: without, a
        `resnet8` on CIFAR-10 loses one to four points of accuracy.
    num_samples : int (default: 4096)
        How many samples at most, >= 2.
    batch_size : int (default: 256)
        Of a forward pass at most, >= 2.
    seed : int (default: 0)
        The statistics are a pure function of it, weights and samples.
    """
    device = torch.device(device)
    source = BatchSource(samples, device, move=False)
    count = min(num_samples, len(source))
    chosen = torch.from_numpy(generator(seed, "batch-norm").permutation(len(source))[:count])
    counters = {n: b.clone() for n, b in model.named_buffers() if n.endswith("num_batches_tracked")}
    cards = [] if device.type == "cpu" else [device]
    draw = torch.Generator(device).manual_seed(derived_seed(seed, "batch-norm"))
    with torch.random.fork_rng(cards, device_type=cards[0].type if cards else "cuda"):
        torch.manual_seed(derived_seed(seed, "batch-norm"))  # for dropout
        inputs = (source.batch(part)[0] for part in chosen.tensor_split(-(-count // batch_size)))
        augmented = (augment(one, draw) if augment else one for one in inputs)
        update_bn(((one,) for one in augmented), model.to(device))
    for name, buffer in model.named_buffers():
        if name in counters:
            buffer.copy_(counters[name])
