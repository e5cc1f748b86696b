"""Training data on a device once, for all workers of a process there, as far as they fit."""

import torch

from .device_memory import bytes_to_move, stays_on_host, tell_host
from .samples import HostSamples, IndexedSamples, Samples, tensor_parts


def samples_on(samples: Samples, device: str | torch.device) -> Samples:
    """Return the same data set with its tensors on the device; of another kind as it is.

    What is made of it there, such as a `LocalSGD`, then has no copy of its own. On a CPU nothing
    is copied: a memory map stays one. Tensors that would take more than half of the device's free
    memory become `HostSamples`, and one line in the log says so.
    """
    device = torch.device(device)
    if isinstance(samples, IndexedSamples):
        return IndexedSamples(samples_on(samples.samples, device), samples.indices)
    parts = tensor_parts(samples)
    if parts is None or isinstance(samples, HostSamples):
        return samples
    num_bytes = bytes_to_move(parts, device)
    if num_bytes == 0:
        return samples
    if stays_on_host(num_bytes, device):
        return HostSamples(parts)
    try:
        return [part.to(device) for part in parts]
    except torch.OutOfMemoryError:  # another process took it meanwhile
        tell_host(num_bytes, device, "more than there is room for")
    return HostSamples(parts)
