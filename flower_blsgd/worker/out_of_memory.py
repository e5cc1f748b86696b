"""What to tell when a step does not fit into the memory of its device."""

import contextlib
import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import UsageError
from .rehearsal import rehearsal
from .steps import Steps

SMALLEST_BATCH = 2
"""As of the setting, and of whoever shares it out: of one sample BatchNorm has no variance."""


def too_large(
    steps: Steps, indices: np.ndarray[Any, Any], batch_size: int, worker: str
) -> UsageError:
    """Return what the user is told, in one line: the worker, what did not fit, and what does.

    Smaller batches are tried on the device, eagerly; they leave no trace, and the graphs and
    gradients that hold memory are given up before. Nobody may record meanwhile.

    A worker's batch is not always the setting, but it grows and shrinks with it.

    Parameters
    ----------
    steps : Steps
        What had too little memory.
    indices : numpy.ndarray
        Whole numbers of shape (n,), n >= batch_size: samples to try with.
    batch_size : int
        b_i: what did not fit.
    worker : str
        What the user calls it.
    """
    eager = steps.eager

    def attempt(smaller: int) -> None:
        steps.release()
        with rehearsal(eager.step.model, eager.step.optimizer, copies_on=torch.device("cpu")):
            eager(torch.from_numpy(indices[:smaller].astype(np.int64)).to(eager.step.device))

    fitting = largest_batch(attempt, batch_size)
    steps.release()
    begin = f"worker {worker}: too little memory for its batch of {batch_size}"
    if fitting:
        times = math.ceil(batch_size / fitting)
        return UsageError(
            f"{begin}; a batch of {fitting} fits: divide batch-size by {times} or more"
        )
    return UsageError(
        f"{begin}, and no smaller one fits (the smallest has {SMALLEST_BATCH}); take another "
        "device or model"
    )


def largest_batch(attempt: Callable[[int], None], batch_size: int) -> int:
    """Return the largest of batch_size / 2, / 4, ..., 2 that fits; 0 if none does.

    Parameters
    ----------
    attempt : callable
        Does a step on so many samples. Whatever it raises, they do not fit.
    batch_size : int
        What did not fit.
    """
    while batch_size > SMALLEST_BATCH:
        batch_size = max(batch_size // 2, SMALLEST_BATCH)
        _return_memory()
        if _fits(attempt, batch_size):
            return batch_size
    return 0


def _fits(attempt: Callable[[int], None], batch_size: int) -> bool:
    try:
        attempt(batch_size)
    except Exception:  # not only too little memory: what the user is told is that
        return False  # only the end of this handler frees what the failed step held
    return True


def _return_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # torch refuses after a recording that failed
            torch.cuda.empty_cache()
