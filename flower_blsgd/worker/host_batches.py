"""Data that are too large for an accelerator: gathered on the host, batch by batch."""

import torch
from torch import Tensor

from .samples import HostSamples


class HostBatches:
    """Gathers each batch on the host and copies it to the device, without waiting for that.

    To CUDA the copy goes through page-locked memory, which torch keeps and uses again when the
    copy is done; so the host gathers the next batch while the device computes.

    Parameters
    ----------
    samples : HostSamples
        A pair (inputs, targets).
    device : torch.device
        Where batches are needed.
    pin_memory : bool, optional
        Whether to go through page-locked memory; by default to CUDA only.
    """

    def __init__(
        self, samples: HostSamples, device: torch.device, pin_memory: bool | None = None
    ) -> None:
        self._inputs, self._targets = samples.parts
        self._device = device
        self._pin = device.type == "cuda" if pin_memory is None else pin_memory

    @property
    def on_device(self) -> bool:
        """Return False: the host gathers every batch."""
        return False

    def __len__(self) -> int:
        return len(self._inputs)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples, on the device."""
        indices = indices.cpu()
        return self._gather(self._inputs, indices), self._gather(self._targets, indices)

    def _gather(self, part: Tensor, indices: Tensor) -> Tensor:
        places = indices.to(part.device)
        if part.device.type != "cpu":  # a tensor that its owner put on some device
            return part[places].to(self._device)
        rows = torch.empty((len(places), *part.shape[1:]), dtype=part.dtype, pin_memory=self._pin)
        torch.index_select(part, 0, places, out=rows)
        return rows.to(self._device, non_blocking=self._pin)
