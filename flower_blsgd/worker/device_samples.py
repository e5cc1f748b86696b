"""Training data on a device once, for all workers of a process there."""

import torch

from .batches import IndexedSamples, Samples, tensor_parts


def samples_on(samples: Samples, device: str | torch.device) -> Samples:
    """Return the same data set with its tensors on the device; of another kind as it is.

    What is made of it there, such as a `LocalSGD`, then has no copy of its own. On a CPU nothing
    is copied: a memory map stays one.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return samples
    if isinstance(samples, IndexedSamples):
        return IndexedSamples(samples_on(samples.samples, device), samples.indices)
    parts = tensor_parts(samples)
    return samples if parts is None else [part.to(device) for part in parts]
