"""Let a CUDA device copy from and to shared memory without the processor's help."""

import logging
import weakref
from collections.abc import Callable
from typing import Any

from .shared_block import AnyArray, Block, Lease

_LOG = logging.getLogger(__name__)

Call = Callable[..., Any]


def pin(memory: AnyArray, register: Call | None = None, unregister: Call | None = None) -> bool:
    """Register the block that this memory is the whole of with CUDA, once for its life.

    Copies between a device and registered (page-locked) memory run beside the computing, and
    faster. Where it cannot be registered they work all the same.

    Parameters
    ----------
    memory : numpy.ndarray
        Of a flat record; memory that is not shared is left alone.
    register, unregister : callable, optional
        ``(address, num_bytes) -> error`` and ``(address) -> error``, 0 for no error; by default
        those of the CUDA runtime.

    Returns
    -------
    bool
        Whether it is registered.
    """
    if not isinstance(memory, Lease):
        return False
    block = memory.block
    if block.pinned is None:
        if register is None or unregister is None:
            register, unregister = _of_cuda()
        block.pinned = _register(block, register, unregister)
    return block.pinned


def _register(block: Block, register: Call, unregister: Call) -> bool:
    error = int(register(block.address, block.size))
    if error:
        _LOG.info("CUDA cannot register shared memory (error %d): copies take longer", error)
        return False
    # The block outlives all leases on it, and its map outlives the block's last breath.
    weakref.finalize(block, unregister, block.address)
    return True


def _of_cuda() -> tuple[Call, Call]:
    import torch

    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return lambda address, size: runtime.cudaHostRegister(address, size, 0), (
        runtime.cudaHostUnregister
    )
