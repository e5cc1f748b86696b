"""What to tell when a step does not fit into the memory of its device."""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import UsageError
from .rehearsal import rehearsal
from .steps import Steps


def too_large(steps: Steps, indices: Tensor, batch_size: int, worker: str) -> UsageError:
    """Return what the user is told, in one line: the worker, what did not fit, and what does.

    Smaller batches are tried on the device, eagerly; they leave no trace, and the graphs and
    gradients that hold memory are given up before.

    Parameters
    ----------
    steps : Steps
        What had too little memory.
    indices : torch.Tensor
        int64 of shape (n,), n >= batch_size / 2: samples to try with.
    batch_size : int
        What did not fit.
    worker : str
        What the user calls it.
    """
    eager = steps.eager

    def attempt(smaller: int) -> None:
        steps.release()
        with rehearsal(eager.step.model, eager.step.optimizer, copies_on=torch.device("cpu")):
            eager(indices[:smaller])

    fitting = largest_batch(attempt, batch_size)
    steps.release()
    begin = f"worker {worker}: too little memory for batch-size = {batch_size}"
    if fitting:
        return UsageError(f"{begin}; {fitting} fits: set batch-size = {fitting}")
    return UsageError(f"{begin}, and not even one sample fits; take another device or model")


def largest_batch(attempt: Callable[[int], None], batch_size: int) -> int:
    """Return the largest of batch_size / 2, / 4, ... that fits; 0 if not even one sample does.

    Parameters
    ----------
    attempt : callable
        Does a step on so many samples, or raises `torch.OutOfMemoryError`.
    batch_size : int
        What did not fit.
    """
    while (batch_size := batch_size // 2) >= 1:
        _return_memory()
        if _fits(attempt, batch_size):
            return batch_size
    return 0


def _fits(attempt: Callable[[int], None], batch_size: int) -> bool:
    try:
        attempt(batch_size)
    except torch.OutOfMemoryError:
        return False  # only the end of this handler frees what the failed step held
    return True


def _return_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
