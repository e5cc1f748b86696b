"""What to tell when a step does not fit into the memory of its device."""

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import UsageError
from .micro_batches import dependence
from .rehearsal import rehearsal
from .steps import EagerSteps, Steps

SMALLEST_BATCH = 2
"""As of the setting, and of whoever shares it out: of one sample BatchNorm has no variance."""


def too_large(
    steps: Steps, indices: np.ndarray[Any, Any], batch_size: int, worker: str
) -> UsageError:
    """Return what the user is told, in one line: the worker, what did not fit, and what does.

    Where the model allows it, the same batch is tried in smaller and smaller pieces, which gives
    the same result; else smaller batches. That happens on the device, eagerly; it leaves no trace,
    and the graphs and gradients that hold memory are given up before. Nobody may record meanwhile.

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
    step = steps.eager.step
    begin = f"worker {worker}: too little memory for its batch of {batch_size}"
    whole = not 0 < step.micro_batch_size < batch_size
    if not whole:
        begin += f" in pieces of {step.micro_batch_size}"
    if dependence(step.model):
        return _smaller_batch(steps, indices, batch_size, begin)

    def attempt(piece: int) -> None:
        smaller = EagerSteps(dataclasses.replace(step, micro_batch_size=piece))
        _try(steps, smaller, indices[:batch_size])

    fitting = largest_size(attempt, batch_size if whole else step.micro_batch_size, 1)
    steps.release()
    if fitting:
        return UsageError(
            f"{begin}; pieces of {fitting} fit: set micro-batch-size = {fitting}, which gives the "
            "same result"
        )
    return UsageError(
        f"{begin}, and not even one sample at a time fits; take another device or model"
    )


def _smaller_batch(
    steps: Steps, indices: np.ndarray[Any, Any], batch_size: int, begin: str
) -> UsageError:
    fitting = largest_size(
        lambda smaller: _try(steps, steps.eager, indices[:smaller]), batch_size, SMALLEST_BATCH
    )
    steps.release()
    if fitting:
        times = math.ceil(batch_size / fitting)
        return UsageError(
            f"{begin}; a batch of {fitting} fits: divide batch-size by {times} or more"
        )
    return UsageError(
        f"{begin}, and no smaller one fits (the smallest has {SMALLEST_BATCH}); take another "
        "device or model"
    )


def _try(steps: Steps, eager: EagerSteps, indices: np.ndarray[Any, Any]) -> None:
    """Do a step that leaves no trace."""
    steps.release()
    step = eager.step
    places = torch.from_numpy(indices.astype(np.int64))
    with rehearsal(step.model, step.optimizer, copies_on=torch.device("cpu")):
        eager(places.to(step.device) if step.source.on_device else places)


def largest_size(attempt: Callable[[int], None], size: int, smallest: int) -> int:
    """Return the largest of size / 2, / 4, ..., smallest that fits; 0 if none does.

    Parameters
    ----------
    attempt : callable
        Does a step with so many samples at once. Whatever it raises, they do not fit.
    size : int
        What did not fit.
    smallest : int
        What is tried last, >= 1.
    """
    while size > smallest:
        size = max(size // 2, smallest)
        _return_memory()
        if _fits(attempt, size):
            return size
    return 0


def _fits(attempt: Callable[[int], None], size: int) -> bool:
    try:
        attempt(size)
    except Exception:  # not only too little memory: what the user is told is that
        return False  # only the end of this handler frees what the failed step held
    return True


def _return_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # torch refuses after a recording that failed
            torch.cuda.empty_cache()
