"""Wait until a device has done what it was told."""

import torch


def synchronize(device: torch.device) -> None:
    """Wait for this thread's work there, not for that of workers beside it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)
