"""Weights of the workers in the average, and the average itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from .model_sum import move
from .pieces import AnyArray

__all__ = [
    "AnyArray",
    "EqualWeighting",
    "LoadWeighting",
    "NormalizedWeighting",
    "Weighting",
    "moved_by_updates",
    "weighted_average",
]


class Weighting(Protocol):
    """Turns the work that each worker completed into its weight in the average.

    It may have an attribute ``momentum_buffers``: the only policy that it is right with. And a
    method ``update_scales(weights, completed_steps)``: then parameters move by the sum of the
    workers' updates, each times its scale, while buffers are averaged with the weights.

    Workers behind one node are averaged there, and only the average reaches the server. That is
    the same average if the class has an attribute ``worker_weight``: ``"load"`` or ``"equal"``,
    what a worker's weight is proportional to. With ``update_scales`` it also needs a method
    ``update_norm(steps)``: a worker's scale is proportional to its weight over that number.
    """

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        """Return one weight per worker, in order, that add up to 1."""
        ...


class LoadWeighting:
    """Weight proportional to the load really completed (the paper's rule).

    The load is completed steps times batch size. At equal batch sizes this is the num-examples
    rule of FedAvg (McMahan et al. 2017), which the paper does not cite.
    """

    worker_weight: ClassVar[str] = "load"

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

    worker_weight: ClassVar[str] = "equal"

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


@dataclass(frozen=True)
class NormalizedWeighting:
    """FedNova: every worker's update counts as a direction, whatever its number of steps.

    Source: Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous
    Federated Optimization". With p_i = 1/m, a_i the sum of the coefficients with which the
    gradients of tau_i steps enter the update, and tau_eff = sum_i p_i a_i:
    ``x <- x + sum_i (tau_eff p_i / a_i) (x_i - x)``. Momentum must begin at zero in every round.

    Parameters
    ----------
    momentum : float (default: 0.9)
        Of the local steps; 0 for an optimizer without, and for AdamW, whose steps count alike.
    nesterov : bool (default: False)
        Whether it is Nesterov momentum.
    """

    momentum: float = 0.9
    nesterov: bool = False
    momentum_buffers: str = "reset"
    worker_weight: ClassVar[str] = "equal"

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        """Return p_i: 1/m for the m workers that completed something, 0 for the others."""
        return EqualWeighting().weights(completed_loads)

    def update_scales(
        self, weights: Sequence[float], completed_steps: Sequence[int]
    ) -> list[float]:
        """Return tau_eff p_i / a_i of each worker; 0 for one that completed nothing.

        >>> scales = NormalizedWeighting(0.9).update_scales([0.5, 0.5], [3, 1])
        >>> [round(scale, 4) for scale in scales]
        [0.2946, 1.6525]
        """
        norms = [
            self.update_norm(steps) if weight else 0.0
            for weight, steps in zip(weights, completed_steps, strict=True)
        ]
        effective = sum(p * a for p, a in zip(weights, norms, strict=True))
        return [effective * p / a if a else 0.0 for p, a in zip(weights, norms, strict=True)]

    def update_norm(self, steps: int) -> float:
        """Return a_i of that many steps.

        Each gradient counts once directly and again in all later steps.
        """
        total = power_sum = 0.0
        for _ in range(steps):
            power_sum = 1.0 + self.momentum * power_sum
            total += 1.0 + self.momentum * power_sum if self.nesterov else power_sum
        return total


def _checked_total(loads: Sequence[float]) -> float:
    if any(load < 0 for load in loads):
        raise ValueError(f"completed loads must not be negative, got {list(loads)}")
    total = sum(loads)
    if total <= 0:
        raise ValueError("nobody completed a step, so there is nothing to average")
    return total


def weighted_average(
    models: Sequence[Mapping[str, AnyArray]],
    weights: Sequence[float],
    out: Mapping[str, AnyArray] | None = None,
) -> dict[str, AnyArray]:
    """Return ``sum_i w_i x_i`` for every named tensor.

    Parameters
    ----------
    models : sequence of mapping
        Tensors by name, the same names, shapes and dtypes in each. Give them in worker order:
        sums run in that order, so that the order of replies changes no bit.
    weights : sequence of float
        One per model, >= 0, adding up to 1.
    out : mapping, optional
        Tensors of these names, shapes and dtypes that the result is written to, and which are
        returned; nothing of a model's size is allocated then. May not overlap the models.

    Returns
    -------
    dict
        Floating tensors are summed in their own precision, float32 at least, as differences to
        the first, and return in the dtype they had: the average of equal models is that model
        to the bit. Large models are summed by several threads, which changes no bit. Integer and
        boolean tensors, such as BatchNorm's counters, take the maximum over the models with a
        positive weight.

    Raises
    ------
    ValueError
        If all weights are 0, or a tensor's shapes or dtypes differ.
    """
    counted = [(model, w) for model, w in zip(models, weights, strict=True) if w > 0]
    if not counted:
        raise ValueError("all weights are 0, so there is nothing to average")
    (first, _), *others = counted
    return move(first, [model for model, _ in others], [w for _, w in others], out)


def moved_by_updates(
    before: Mapping[str, AnyArray],
    models: Sequence[Mapping[str, AnyArray]],
    scales: Sequence[float],
    out: Mapping[str, AnyArray] | None = None,
) -> dict[str, AnyArray]:
    """Return ``x + sum_i s_i (x_i - x)`` for every tensor named in `before`.

    Parameters
    ----------
    before : mapping
        x by name.
    models : sequence of mapping
        x_i by name, at least the same names. Give them in worker order.
    scales : sequence of float
        s_i >= 0; they need not add up to 1, and a model whose scale is 0 is left out.
    out : mapping, optional
        Where the result is written, at least these names; see `weighted_average`.

    Returns
    -------
    dict
        As `weighted_average` returns them.

    Raises
    ------
    ValueError
        If a tensor's shapes or dtypes differ.
    """
    counted = [(model, s) for model, s in zip(models, scales, strict=True) if s > 0]
    return move(before, [model for model, _ in counted], [s for _, s in counted], out)
