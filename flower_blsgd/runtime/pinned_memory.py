"""Let a CUDA device copy from and to shared memory without the processor's help."""

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

from .shared_block import AnyArray, Block, Lease

_LOG = logging.getLogger(__name__)

Call = Callable[..., Any]


def pin(
    memory: AnyArray,
    register: Call | None = None,
    unregister: Call | None = None,
    forget_error: Call | None = None,
) -> bool:
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
    forget_error : callable, optional
        Takes nothing; called after an error, which CUDA would else raise again where this thread
        launches next.

    Returns
    -------
    bool
        Whether it is registered.
    """
    if not isinstance(memory, Lease):
        return False
    block = memory.block
    if block.pinned is None:
        if register is None or unregister is None or forget_error is None:
            register, unregister, forget_error = _of_cuda()
        block.pinned = _register(block, register, unregister, forget_error)
    return block.pinned


def _register(block: Block, register: Call, unregister: Call, forget_error: Call) -> bool:
    error = int(register(block.address, block.size))
    if error:
        forget_error()
        _LOG.info("CUDA cannot register shared memory (error %d): copies take longer", error)
        return False
    # The block outlives all leases on it, and its map outlives the block's last breath.
    weakref.finalize(block, _unregister, block.address, unregister, forget_error)
    return True


def _unregister(address: int, unregister: Call, forget_error: Call) -> None:
    if int(unregister(address)):
        forget_error()


def _of_cuda() -> tuple[Call, Call, Call]:
    import torch

    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(address: int, num_bytes: int) -> Any:
        return runtime.cudaHostRegister(address, num_bytes, 0)

    def forget_error() -> None:
        with contextlib.suppress(RuntimeError):  # it is raised here, once
            torch.zeros(1, device="cuda")

    return register, runtime.cudaHostUnregister, forget_error
