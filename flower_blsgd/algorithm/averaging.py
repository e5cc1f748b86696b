"""Weight the workers' models and average them, at the server and behind nodes with several workers.

Several workers behind one node are averaged there first (hierarchical averaging): with the
server's weights w_i, scales s_i, and relative ones that differ from them by a factor of each node
only, ``sum_i w_i x_i = sum_h (sum_{i in h} w_i) x_h``, so the server needs only the average x_h of
node h. The same holds for ``x + sum_i s_i (x_i - x)``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from .tensor_sum import AnyArray as AnyArray  # noqa: PLC0414
from .tensor_sum import move as move  # noqa: PLC0414


class Weighting(Protocol):
    """Computes each worker's weight in the average from the work that it completed.

    Subclass it and write `weights`; the rest has defaults.
    """

    momentum_buffers: ClassVar[str] = ""
    """The momentum policy that it requires; empty for any."""
    scales_updates: ClassVar[bool] = False
    """Whether parameters move by `update_scales`; buffers are averaged with the weights."""

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        """Return one weight per worker, in order, that add up to 1."""
        ...

    def state_dict(self) -> dict[str, AnyArray]:
        """Return the state, as arrays by name; the built-in weightings have none."""
        return {}

    def load_state_dict(self, state: Mapping[str, AnyArray]) -> None:
        """Restore the state; ValueError if it is of another weighting."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state")

    def update_scales(
        self, weights: Sequence[float], completed_steps: Sequence[int]
    ) -> list[float]:
        """Return s_i of ``x + sum_i s_i (x_i - x)``, by which parameters move."""
        return list(weights)

    def update_norm(self, steps: int) -> float:
        """Return weight / scale of a worker that completed so many steps, up to a common factor."""
        return 1.0


class LoadWeighting(Weighting):
    """Weight proportional to the load really completed (the paper's rule).

    The load is completed steps times batch size. At equal batch sizes this is the num-examples
    rule of FedAvg (McMahan et al. 2017), which the paper does not cite.
    """

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        """Return load_i / sum of loads; a worker that completed nothing has weight 0.

        Raises
        ------
        ValueError
            If no worker completed anything.
        """
        total = _checked_total(completed_loads)
        return [load / total for load in completed_loads]


class PerSampleWeighting(LoadWeighting):
    """Every sample moves the parameters by the same factor, whichever worker trained on it.

    With load weights a slow worker is discounted twice: it does fewer steps, and each of them
    counts less. Here ``x <- x + sum_i s_i (x_i - x)`` with ``s_i = b_i tau_r / sum_j b_j tau_j``
    from completed steps, where r is the worker with the largest completed load, the first of
    equals. So r keeps its load weight, and the s_i may add up to more than 1. Buffers are averaged
    with load weights. A worker that failed has scale 0, and the others share its part.

    With equal workers this is the plain average, and with one step each it is SGD on the
    concatenated batch. In the terms of FedNova (Wang et al. 2020): p_i is the share of the samples,
    tau_eff = tau_r, and momentum is kept. Why and when it pays: ``docs/theory.md``.
    """

    scales_updates: ClassVar[bool] = True

    def update_scales(
        self, weights: Sequence[float], completed_steps: Sequence[int]
    ) -> list[float]:
        """Return s_i = w_i tau_r / tau_i for the load weights w_i; 0 where nothing was completed.

        >>> weighting = PerSampleWeighting()
        >>> weighting.update_scales(weighting.weights([8.0, 4.0, 0.0]), [4, 2, 0])
        [0.6666666666666666, 0.6666666666666666, 0.0]
        """
        longest = completed_steps[max(range(len(weights)), key=lambda i: weights[i])]
        return [
            weight * (longest / steps) if weight else 0.0
            for weight, steps in zip(weights, completed_steps, strict=True)
        ]

    def update_norm(self, steps: int) -> float:
        """Return tau_i: load weights over it are proportional to the batch sizes."""
        return float(steps)


class EqualWeighting(Weighting):
    """The same weight for every worker that completed at least one step."""

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        """Return 1/m for the m workers that completed something, 0 for the others.

        Raises
        ------
        ValueError
            If no worker completed anything.
        """
        _checked_total(completed_loads)
        counted = sum(load > 0 for load in completed_loads)
        return [1 / counted if load > 0 else 0.0 for load in completed_loads]


@dataclass(frozen=True)
class NormalizedWeighting(EqualWeighting):
    """FedNova: every worker's update counts as a direction, whatever its number of steps.

    Source: Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous
    Federated Optimization". With the weights p_i = 1/m, a_i the sum of the coefficients with which
    the gradients of tau_i steps enter the update, and tau_eff = sum_i p_i a_i:
    ``x <- x + sum_i (tau_eff p_i / a_i) (x_i - x)``. Momentum must begin at zero in every round.

    Parameters
    ----------
    momentum : float (default: 0.9)
        Of the local steps; 0 for an optimizer without, and for AdamW, whose steps count alike.
    nesterov : bool (default: False)
        Whether it is Nesterov momentum.
    """

    momentum_buffers: ClassVar[str] = "reset"
    scales_updates: ClassVar[bool] = True

    momentum: float = 0.9
    nesterov: bool = False

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
        """Return a_i, the sum of the factors of a worker's gradients in its update after `steps`.

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
        the model with the largest weight (the first of several), and return in the dtype they
        had: the average of equal models is that model to the bit. Large models are summed by
        several threads, which changes no bit. Integer and boolean tensors, such as BatchNorm's
        counters, take the maximum over the models with a positive weight.

    Raises
    ------
    ValueError
        If all weights are 0, or a tensor's shapes or dtypes differ.
    """
    if not any(weight > 0 for weight in weights):
        raise ValueError("all weights are 0, so there is nothing to average")
    others = list(zip(models, weights, strict=True))
    # Differences to a model that hardly counts would leave its rounding errors in the sum.
    base, _ = others.pop(max(range(len(others)), key=lambda i: weights[i]))
    return move(base, [model for model, _ in others], [w for _, w in others], out)


_WEIGHTS: Mapping[str, Callable[[Sequence[float]], list[float]]] = {
    "load": LoadWeighting().weights,
    "equal": EqualWeighting().weights,
}


def average_at_node(
    models: Sequence[Mapping[str, AnyArray]],
    loads: Sequence[float],
    completed_steps: Sequence[int],
    worker_weight: str,
    update_norms: Sequence[float] = (),
    moving: Sequence[str] = (),
) -> dict[str, AnyArray]:
    """Return the average of the workers behind one node, which stands for them at the server.

    Parameters
    ----------
    models : sequence of mapping
        In worker order.
    loads, completed_steps : sequence of float, of int
        Of each; at least one above 0.
    worker_weight : {"load", "equal"}
        What a worker's weight is proportional to; 0 for one that completed nothing.
    update_norms : sequence of float (default: ())
        By completed steps, from 0 on: the tensors in `moving` count with the weight over this.
    moving : sequence of str (default: ())
        Names of the tensors that move by scaled updates; all others count with the weight.

    Raises
    ------
    ValueError
        If all loads are 0.
    """
    weights = _WEIGHTS[worker_weight](loads)
    if not moving:
        return weighted_average(models, weights)
    scales = [
        weight / update_norms[steps] if weight else 0.0
        for weight, steps in zip(weights, completed_steps, strict=True)
    ]
    total = sum(scales)
    own = [{name: model[name] for name in moving} for model in models]
    moved = weighted_average(own, [scale / total for scale in scales])
    others = [{n: t for n, t in model.items() if n not in moved} for model in models]
    averaged = weighted_average(others, weights) | moved
    return {name: averaged[name] for name in models[0]}


def node_weight(weighting: Weighting) -> str:
    """Return what a worker's weight is proportional to: "load", "equal", or neither: "".

    Only with one of the two is the average of nodes' averages that of all workers, so a weighting
    of one's own, whose rule is not known, is neither.
    """
    rules: dict[type[Weighting], str] = {
        **dict.fromkeys((LoadWeighting, PerSampleWeighting), "load"),
        **dict.fromkeys((EqualWeighting, NormalizedWeighting), "equal"),
    }
    return rules.get(type(weighting), "")


def best_speed_up(
    weighting: Weighting, speeds: Sequence[float], batch_sizes: Sequence[int], of: Sequence[bool]
) -> float:
    """Return how many times sooner all workers reach a loss than some of them, at most.

    For short rounds of steps in proportion to the speeds, samples drawn alike, no drift, no cost of
    communication, and each at its best learning rate. The time to a given loss is then proportional
    to the noise ``sum_i s_i^2 tau_i / b_i`` over the squared progress ``sum_i s_i tau_i``. The
    workers that it is compared with count every sample alike.

    Parameters
    ----------
    weighting : Weighting
        Gives the scales s_i.
    speeds : sequence of float
        Samples per second of each worker, > 0.
    batch_sizes : sequence of int
        b_i.
    of : sequence of bool
        Which of them it is compared with, such as the fast ones; at least one.

    Examples
    --------
    >>> round(best_speed_up(LoadWeighting(), [2.0, 1.0], [32, 32], [True, False]), 2)
    1.39
    >>> round(best_speed_up(PerSampleWeighting(), [2.0, 1.0], [32, 32], [True, False]), 2)
    1.5
    """
    rates = [speed / size for speed, size in zip(speeds, batch_sizes, strict=True)]
    steps = [max(1, round(_MANY_STEPS * rate / max(rates))) for rate in rates]
    loads = [float(count * size) for count, size in zip(steps, batch_sizes, strict=True)]
    scales = weighting.update_scales(weighting.weights(loads), steps)
    progress = sum(scale * count for scale, count in zip(scales, steps, strict=True))
    each = zip(scales, steps, batch_sizes, strict=True)
    noise = sum(scale**2 * count / size for scale, count, size in each)
    return progress**2 / noise / sum(load for load, own in zip(loads, of, strict=True) if own)


_MANY_STEPS = 10_000
"""So many that rounding to whole steps does not show."""


def average_by_load(
    states: Sequence[Mapping[str, AnyArray]], loads: Sequence[float]
) -> dict[str, AnyArray]:
    """Average each tensor, by load, over the models that have it.

    Parameters
    ----------
    states : sequence of mapping
        Tensors by name, in worker order; names may differ, since a worker may have trained other
        parameters.
    loads : sequence of float
        Of each, above 0.
    """
    average: dict[str, AnyArray] = {}
    for name in dict.fromkeys(name for state in states for name in state):
        having = [i for i, state in enumerate(states) if name in state]
        weights = LoadWeighting().weights([loads[i] for i in having])
        average |= weighted_average([{name: states[i][name]} for i in having], weights)
    return average
