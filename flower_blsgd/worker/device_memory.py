"""Whether a data set fits on a device, beside everything else that is to be there."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ..runtime.memory import format_bytes

_LOG = logging.getLogger(__name__)

DATA_SHARE = 0.5
"""Of an accelerator's free memory; the rest is for models, their steps, and other workers."""

_TOLD: set[tuple[str, int]] = set()
"""Data sets that this process told to stay on the host: it asks again for every evaluation."""


def free_bytes_on(device: torch.device) -> int | None:
    """Return how much of a device's memory a process can still take; None where it has no own.

    What torch keeps for later is free too.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "xpu":
        unused = torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
        return torch.xpu.mem_get_info(device)[0] + unused
    return None


def stays_on_host(num_bytes: int, device: torch.device) -> bool:
    """Return whether data are too large for a device; one line in the log says so, once.

    Parameters
    ----------
    num_bytes : int
        What would have to be moved.
    device : torch.device
        Where to.
    """
    free = free_bytes_on(device) if num_bytes else None
    if free is None or num_bytes <= DATA_SHARE * free:
        return False
    tell_host(num_bytes, device, f"more than half of the {format_bytes(free)} that is free there")
    return True


def tell_host(num_bytes: int, device: torch.device, reason: str) -> None:
    """Say in the log, once in a process, that data stay on the host."""
    key = str(device), num_bytes
    if key not in _TOLD:
        _TOLD.add(key)
        _LOG.warning(
            "%s: %s of data is %s; it stays on the host, which gathers and copies every batch",
            device,
            format_bytes(num_bytes),
            reason,
        )


def bytes_to_move(parts: Sequence[Tensor], device: torch.device) -> int:
    """Return the bytes of the tensors that are not on the device."""
    return sum(part.nbytes for part in parts if not _is_on(part, device))


def _is_on(part: Tensor, device: torch.device) -> bool:
    return part.device.type == device.type and device.index in (None, part.device.index)
