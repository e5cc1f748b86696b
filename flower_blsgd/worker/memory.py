"""Find what fits where a step has too little memory, and say so in one line."""

import contextlib
import gc
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..errors import UsageError
from .step import Step, Steps, batch_dependent_module, undone

SMALLEST_BATCH = 2
"""As of the setting, and of whoever shares it out: of one sample BatchNorm has no variance."""


def too_large(
    steps: Steps, indices: np.ndarray[Any, Any], batch_size: int, worker: str
) -> UsageError:
    """Return an error for the user, in one line: the worker, what did not fit, and what does.

    A half of what did not fit is tried, a quarter, and so on: the same batch in micro-batches,
    which gives the same result, or smaller batches where the model's samples depend on each other.
    That happens on the device, eagerly, and is undone; the graphs and gradients that hold memory
    are given up before. Whatever a trial raises, it does not fit.

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
    samples = torch.from_numpy(indices[:batch_size].astype(np.int64))
    samples = samples.to(step.device) if step.source.on_device else samples
    message = f"worker {worker}: too little memory for its batch of {batch_size}"
    size, can_cut = batch_size, not batch_dependent_module(step.model)
    if 0 < step.micro_batch_size < batch_size:
        size = step.micro_batch_size
        message += f" in micro-batches of {size}"
    smallest = 1 if can_cut else SMALLEST_BATCH
    while size > smallest:
        size = max(size // 2, smallest)
        if can_cut:
            fits = _fits(steps, replace(step, micro_batch_size=size), samples)
            way_out = (
                f"micro-batches of {size} fit: set micro-batch-size = {size}, which gives the "
                "same result"
            )
        else:
            # A worker's batch is not always the setting, but it grows and shrinks with it.
            fits = _fits(steps, step, samples[:size])
            times = math.ceil(batch_size / size)
            way_out = f"a batch of {size} fits: divide batch-size by {times} or more"
        if fits:
            return UsageError(f"{message}; {way_out}")
    nothing = "not even one sample at a time fits" if can_cut else "no smaller one fits"
    return UsageError(f"{message}, and {nothing}; take another device or model")


def _fits(steps: Steps, step: Step, samples: torch.Tensor) -> bool:
    """Return whether a step fits into the memory that the steps give back; it is undone."""
    steps.release()
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # torch refuses after a capture that failed
            torch.cuda.empty_cache()
    try:
        with undone(step.model, step.optimizer):
            Steps(step)(samples)
    except Exception:  # not only too little memory: the user still reads of that
        return False  # only the end of this handler frees what the failed step held
    finally:
        steps.release()
    return True
