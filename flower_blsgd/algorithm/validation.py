"""Checks of what custom samplers, selections, step policies and weightings return.

Each check raises UsageError with the name of the class and the fault.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from .averaging import Weighting
from .sampling import EpochRequest, SampleList, Sampler
from .selection import Selected, Selection


def checked_numbers(
    part: object, method: str, numbers: Any, count: int, minimum: int = 0, whole: bool = False
) -> list[Any]:
    """Return `numbers` as a list if they are `count` finite or whole numbers >= `minimum`."""
    found = list(numbers) if isinstance(numbers, list | tuple | np.ndarray) else []
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    good = all(isinstance(number, kinds) and minimum <= number < math.inf for number in found)
    if len(found) != count or not good:
        raise UsageError(
            f"{type(part).__name__}.{method} returned {numbers!r}; it must return a list of "
            f"{count} {'whole' if whole else 'finite'} numbers, each at least {minimum}"
        )
    return [int(number) if whole else float(number) for number in found]


def checked_weights(weighting: Weighting, completed_loads: Sequence[float]) -> list[float]:
    """Return a weighting's weights, which add up to 1; 0 for workers that completed nothing."""
    given = weighting.weights(completed_loads)
    weights = checked_numbers(weighting, "weights", given, len(completed_loads))
    counted = [w if load > 0 else 0.0 for w, load in zip(weights, completed_loads, strict=True)]
    if abs(math.fsum(weights) - 1) > 1e-6 or not any(counted):
        raise UsageError(
            f"{type(weighting).__name__}.weights returned {given!r} for the loads "
            f"{list(completed_loads)}; they must add up to 1, with 0 where the load is 0"
        )
    total = 1.0 if counted == weights else sum(counted)
    return [weight / total for weight in counted]


def checked_selected(selection: Selection, selected: Any, num_samples: int) -> Selected:
    """Return the result of a selection; all samples for None."""
    if selected is None:
        return Selected(np.arange(num_samples, dtype=np.int32))
    name = f"{type(selection).__name__}.select"
    if not isinstance(selected, Selected):
        raise UsageError(f"{name} returned a {type(selected).__name__}; it must return a Selected")
    indices, weights = np.asarray(selected.indices), selected.weights
    listed = indices.dtype == np.int32 and indices.ndim == 1 and len(indices) > 0
    if not listed or indices[0] < 0 or indices[-1] >= num_samples or (np.diff(indices) < 1).any():
        raise UsageError(
            f"{name}: its indices must be int32 of shape (M,), M at least 1, ascending, without "
            f"repetitions, in [0, {num_samples - 1}]"
        )
    if weights is not None and not (
        np.shape(weights) == (num_samples,)
        and getattr(weights, "dtype", None) == np.float32
        and ((weights >= 0) & (weights < np.inf)).all()
    ):
        raise UsageError(
            f"{name}: its weights must be float32 of shape ({num_samples},), finite, at least 0"
        )
    return Selected(indices, weights)


def checked_lists(
    sampler: Sampler, sample_lists: Any, request: EpochRequest, num_samples: int
) -> tuple[SampleList, ...]:
    """Return a sampler's lists; linear in their length. A list may repeat a sample."""
    where = f"{type(sampler).__name__}.sample_lists, epoch {request.epoch}"
    lists = tuple(sample_lists) if isinstance(sample_lists, list | tuple) else (None,)
    if not all(isinstance(each, SampleList) for each in lists):
        raise UsageError(f"{where}: it must return a list of SampleList")
    number = len(request.participants)
    members = [worker for each in lists for worker in each.members]
    if sorted(members) != list(range(number)):
        raise UsageError(
            f"{where}: its lists are for the participants {members}; each of the {number}, counted "
            "from 0, must be in exactly one list"
        )
    for each in lists:
        indices, needed = each.indices, request.set_size(each.members)
        of = f"{where}: the samples of the participants {list(each.members)}"
        if getattr(indices, "dtype", None) != np.int32 or indices.shape != (needed,):
            kind, shape = getattr(indices, "dtype", type(indices).__name__), np.shape(indices)
            raise UsageError(f"{of} are {kind} of shape {shape}, not int32 of shape ({needed},)")
        if needed and not 0 <= indices.min() <= indices.max() < num_samples:
            lowest, highest = indices.min(), indices.max()
            raise UsageError(f"{of} lie in [{lowest}, {highest}], not in [0, {num_samples - 1}]")
    return lists
