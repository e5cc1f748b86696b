"""How exactly a device multiplies: float32, TF32 or bfloat16."""

import contextlib
import logging
import platform
from typing import Literal, get_args

import torch

from ..errors import UsageError

_LOG = logging.getLogger(__name__)

Precision = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

_FAST_ON_CPU = ("avx512_bf16", "amx_bf16", "bf16")
"""Processors with one of these multiply bfloat16 faster than float32; as torch names them."""


def use_precision(precision: str, device: str | torch.device) -> None:
    """Set what CUDA does with float32 matrices and convolutions, in the whole process.

    torch keeps this per process, and convolutions begin with TF32 allowed: 10 bits of mantissa,
    which is not what ``"float32"`` says. It is not put back, since workers that compute side by
    side in threads would put it back under each other; they all have the same setting.
    """
    if torch.device(device).type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(
    precision: Precision, device: torch.device, keep_casts: bool = True
) -> contextlib.AbstractContextManager[object]:
    """Return what the forward pass and the loss are computed in.

    Parameters
    ----------
    precision : {"float32", "tf32", "bfloat16"}
        With bfloat16 torch casts the inputs of matrix products and convolutions, weights stay
        float32, and so do sums and losses.
    device : torch.device
        Where.
    keep_casts : bool (default: True)
        Cast a weight once for all its uses. Not inside a captured graph: a cast that outlives the
        capture would be of old weights.
    """
    if precision != "bfloat16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=keep_casts)


def check_precision(precision: str, device: torch.device) -> Precision:
    """Return the precision if this device can compute so.

    One line in the log tells where bfloat16 is only emulated, and slower than float32.

    Raises
    ------
    UsageError
        If there is no such precision, or not on this kind of device.
    """
    for known in PRECISIONS:
        if precision == known:
            if known == "bfloat16":
                _check_bfloat16(device)
            return known
    raise UsageError(f"precision = {precision!r} must be one of {', '.join(map(repr, PRECISIONS))}")


def _check_bfloat16(device: torch.device) -> None:
    if not torch.amp.is_autocast_available(device.type):
        raise UsageError(
            f'precision = "bfloat16" does not work on {device.type}; use "float32" there'
        )
    if device.type == "cpu" and not cpu_has_bfloat16():
        _LOG.warning(
            'precision = "bfloat16": this CPU (%s) has no instructions for it and emulates it, '
            'slower than "float32"',
            platform.processor() or platform.machine(),
        )


def cpu_has_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 without emulating it."""
    try:
        capabilities = torch.cpu.get_capabilities()
    except AttributeError:  # torch 2.11
        return _cpuinfo_has_bfloat16()
    return any(capabilities.get(name, False) for name in _FAST_ON_CPU)


def _cpuinfo_has_bfloat16() -> bool:
    try:
        with open("/proc/cpuinfo") as lines:
            flags = {
                word
                for line in lines
                if line.lower().startswith(("flags", "features"))
                for word in line.split()
            }
    except OSError:
        return False
    return not flags.isdisjoint(_FAST_ON_CPU)
