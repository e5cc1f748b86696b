"""Weights of the workers in the average, and the average itself."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]

_CHUNK_ELEMENTS = 1 << 16
"""Elements that are averaged at a time, so that the wide accumulator stays in the cache."""


class Weighting(Protocol):
    """Turns the work that each worker completed into its weight in the average."""

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        """Return one weight per worker, in order, that add up to 1."""
        ...


class LoadWeighting:
    """Weight proportional to the load really completed (the paper's rule).

    The load is completed steps times batch size. At equal batch sizes this is the num-examples
    rule of FedAvg (McMahan et al. 2017), which the paper does not cite.
    """

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        """Return load_i / sum of loads; a worker that completed nothing counts 0.

        Raises
        ------
        ValueError
            If nobody completed anything.
        """
        total = _checked_total(completed_loads)
        return [load / total for load in completed_loads]


class EqualWeighting:
    """The same weight for every worker that completed at least one step."""

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        """Return 1/m for the m workers that completed something, 0 for the others.

        Raises
        ------
        ValueError
            If nobody completed anything.
        """
        _checked_total(completed_loads)
        counted = sum(load > 0 for load in completed_loads)
        return [1 / counted if load > 0 else 0.0 for load in completed_loads]


def _checked_total(loads: Sequence[float]) -> float:
    if any(load < 0 for load in loads):
        raise ValueError(f"completed loads must not be negative, got {list(loads)}")
    total = sum(loads)
    if total <= 0:
        raise ValueError("nobody completed a step, so there is nothing to average")
    return total


def weighted_average(
    models: Sequence[Mapping[str, AnyArray]], weights: Sequence[float]
) -> dict[str, AnyArray]:
    """Return ``sum_i w_i x_i`` for every named tensor.

    Parameters
    ----------
    models : sequence of mapping
        Tensors by name, the same names and shapes in each. Give them in worker order: sums
        run in that order, so that the order of replies changes no bit.
    weights : sequence of float
        One per model, >= 0, adding up to 1.

    Returns
    -------
    dict
        Floating tensors are summed in float64, as differences to the first, and return in the
        dtype they had: the average of equal models is that model to the bit. Integer and
        boolean tensors, such as BatchNorm's counters, take the maximum over the models with a
        positive weight.

    Raises
    ------
    ValueError
        If all weights are 0, or a tensor's shapes differ.
    """
    counted = [(model, w) for model, w in zip(models, weights, strict=True) if w > 0]
    if not counted:
        raise ValueError("all weights are 0, so there is nothing to average")
    return {name: _average_tensor(name, counted) for name in counted[0][0]}


def _average_tensor(name: str, counted: Sequence[tuple[Mapping[str, AnyArray], float]]) -> AnyArray:
    tensors = [np.asarray(model[name]) for model, _ in counted]
    first = tensors[0]
    if any(tensor.shape != first.shape for tensor in tensors):
        raise ValueError(f"tensor {name!r} has shapes {sorted({t.shape for t in tensors})}")
    if first.dtype.kind not in "fc":
        return np.asarray(np.maximum.reduce(tensors))
    flat = [np.ascontiguousarray(tensor).reshape(-1) for tensor in tensors]
    wide = np.result_type(first.dtype, np.float64)
    average = np.empty(first.size, first.dtype)
    difference = np.empty(min(first.size, _CHUNK_ELEMENTS), wide)
    for start in range(0, first.size, _CHUNK_ELEMENTS):
        chunk = slice(start, start + _CHUNK_ELEMENTS)
        base = flat[0][chunk].astype(wide)
        total = base.copy()
        part = difference[: base.size]
        for values, (_, weight) in zip(flat[1:], counted[1:], strict=True):
            np.subtract(values[chunk], base, out=part)
            part *= weight
            total += part
        average[chunk] = total
    return average.reshape(first.shape)
