"""Weights of the workers and averages of their models, on the server and on nodes.

The workers behind a node with several devices are averaged there first (hierarchical averaging).
The server then needs only the average x_h of node h, because
``sum_i w_i x_i = sum_h (sum_{i in h} w_i) x_h``. For x_h it is enough to know the weights w_i up to
a factor per node. The same holds for the scales in ``x + sum_i s_i (x_i - x)``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from .tensor_sum import AnyArray, move


class Weighting(Protocol):
    """Rule for each worker's weight in the average, from the work that it completed.

    Subclass it and implement `weights`; everything else has defaults.
    """

    momentum_buffers: ClassVar[str] = ""
    """The required momentum policy; empty for any."""
    scales_updates: ClassVar[bool] = False
    """Whether parameters move by `update_scales`. Buffers are always averaged by `weights`."""

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        """Return one weight per worker, in worker order; they add up to 1."""
        ...

    def state_dict(self) -> dict[str, AnyArray]:
        """Return the state, as arrays by name; the built-in weightings have none."""
        return {}

    def load_state_dict(self, state: Mapping[str, AnyArray]) -> None:
        """Restore the state; ValueError if it belongs to another weighting."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state")

    def update_scales(
        self, weights: Sequence[float], completed_steps: Sequence[int]
    ) -> list[float]:
        """Return the scales s_i of ``x + sum_i s_i (x_i - x)``, the update of the parameters."""
        return list(weights)

    def update_norm(self, steps: int) -> float:
        """Return weight / scale of a worker that completed `steps`, up to a common factor."""
        return 1.0


class LoadWeighting(Weighting):
    """Weight proportional to the completed load (the paper's rule).

    The load is completed steps times batch size. With equal batch sizes this is FedAvg's
    ``num-examples`` rule (McMahan et al. 2017), which the paper does not cite.
    """

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        """Return load_i / sum of loads; ValueError if all loads are 0."""
        total = _checked_total(completed_loads)
        return [load / total for load in completed_loads]


class PerSampleWeighting(LoadWeighting):
    """Equal influence of every sample on the parameters, independent of the worker.

    Load weights discount a slow worker twice: it does fewer steps, and each step counts less. Here
    ``x <- x + sum_i s_i (x_i - x)`` with ``s_i = b_i tau_r / sum_j b_j tau_j`` from completed
    steps. Worker r has the largest completed load (the first one in a tie) and keeps its load
    weight, so the s_i may add up to more than 1. Buffers are averaged with load weights. A failed
    worker has scale 0, and the others share its part.

    With equal workers this is the plain average, and with one step each it is SGD on the
    concatenated batch. In terms of FedNova (Wang et al. 2020), p_i is the share of the samples,
    tau_eff = tau_r, and momentum is kept. ``docs/explanation/theory.md`` explains when it helps.
    """

    scales_updates: ClassVar[bool] = True

    def update_scales(
        self, weights: Sequence[float], completed_steps: Sequence[int]
    ) -> list[float]:
        """Return s_i = w_i tau_r / tau_i for the load weights w_i; 0 without a completed step."""
        longest = completed_steps[max(range(len(weights)), key=lambda i: weights[i])]
        return [
            weight * (longest / steps) if weight else 0.0
            for weight, steps in zip(weights, completed_steps, strict=True)
        ]

    def update_norm(self, steps: int) -> float:
        """Return tau_i: the load weight over tau_i is proportional to the batch size."""
        return float(steps)


class EqualWeighting(Weighting):
    """Equal weights for all workers that completed at least one step."""

    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        """Return 1/m for each of the m workers with a load, else 0; ValueError if m is 0."""
        _checked_total(completed_loads)
        counted = sum(load > 0 for load in completed_loads)
        return [1 / counted if load > 0 else 0.0 for load in completed_loads]


@dataclass(frozen=True)
class NormalizedWeighting(EqualWeighting):
    """FedNova: updates are normalized by the number of local steps.

    Source: Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous
    Federated Optimization". The update is ``x <- x + sum_i (tau_eff p_i / a_i) (x_i - x)`` with
    p_i = 1/m and tau_eff = sum_i p_i a_i, where a_i is the sum of the coefficients of the gradients
    of tau_i steps. Momentum must be zero at the start of every round.

    Parameters
    ----------
    momentum : float (default: 0.9)
        Momentum of the local steps; 0 for SGD without momentum and for AdamW.
    nesterov : bool (default: False)
        Whether to use Nesterov momentum.
    """

    momentum_buffers: ClassVar[str] = "reset"
    scales_updates: ClassVar[bool] = True

    momentum: float = 0.9
    nesterov: bool = False

    def update_scales(
        self, weights: Sequence[float], completed_steps: Sequence[int]
    ) -> list[float]:
        """Return tau_eff p_i / a_i of each worker; 0 if it completed no step."""
        norms = [
            self.update_norm(steps) if weight else 0.0
            for weight, steps in zip(weights, completed_steps, strict=True)
        ]
        effective = sum(p * a for p, a in zip(weights, norms, strict=True))
        return [effective * p / a if a else 0.0 for p, a in zip(weights, norms, strict=True)]

    def update_norm(self, steps: int) -> float:
        """Return a_i after `steps`; momentum makes a gradient count again in all later steps."""
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
        raise ValueError("no worker completed a step, so there is nothing to average")
    return total


def weighted_average(
    models: Sequence[Mapping[str, AnyArray]],
    weights: Sequence[float],
    out: Mapping[str, AnyArray] | None = None,
) -> dict[str, AnyArray]:
    """Return ``sum_i w_i x_i`` for every named tensor.

    The weights are >= 0 and add up to 1. All models have the same names, shapes and dtypes. Sums
    run in their order; pass worker order to make the result independent of the order of replies. If
    `out` is given, the result is written to it; it is like a model, but must not overlap one.
    ValueError if all weights are 0, or the shapes or dtypes of a tensor differ.

    Floating tensors keep their dtype. They are summed in it, or in float32 if that is wider, as
    differences to the model with the largest weight, so the average of equal models is
    bit-identical to the model. Large models are summed by several threads, which does not change
    the result. For integer and boolean tensors, such as BatchNorm's counters: the maximum over the
    models with a weight above 0.
    """
    if not any(weight > 0 for weight in weights):
        raise ValueError("all weights are 0, so there is nothing to average")
    others = list(zip(models, weights, strict=True))
    # Differences to a model with a tiny weight would leave its rounding errors in the sum.
    base, _ = others.pop(max(range(len(others)), key=lambda i: weights[i]))
    return move(base, [model for model, _ in others], [w for _, w in others], out)


_NODE_RULES: Mapping[str, tuple[type[Weighting], ...]] = {
    "load": (LoadWeighting, PerSampleWeighting),
    "equal": (EqualWeighting, NormalizedWeighting),
}
"""Built-in weightings by their rule on a node. The first of each computes the weights there."""


def average_at_node(
    models: Sequence[Mapping[str, AnyArray]],
    loads: Sequence[float],
    completed_steps: Sequence[int],
    worker_weight: str,
    update_norms: Sequence[float] = (),
    moving: Sequence[str] = (),
) -> dict[str, AnyArray]:
    """Return the average of the workers behind one node, which represents them at the server.

    All sequences of models, loads and steps are in worker order. The weight of a worker is
    proportional to `worker_weight`, "load" or "equal", and 0 if it completed no step; ValueError if
    all loads are 0. The tensors named in `moving` move by scaled updates and are averaged by weight
    / norm, all others by weight; `update_norms` is `Weighting.update_norm` by completed steps, from
    0 on.
    """
    weights = _NODE_RULES[worker_weight][0]().weights(loads)
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
    """Return the rule for the workers' weights on a node: "load", "equal", or "" if unknown.

    With "load" and "equal", the average of the nodes' averages is the average of all workers. The
    rule of a custom weighting is unknown.
    """
    return next((rule for rule, its in _NODE_RULES.items() if type(weighting) in its), "")


def best_speed_up(
    weighting: Weighting, speeds: Sequence[float], batch_sizes: Sequence[int], of: Sequence[bool]
) -> float:
    """Return an upper bound of the speed-up of all workers over some of them.

    The speed-up is in time to a given loss, for short rounds with steps in proportion to the
    speeds, equally drawn samples, no drift, no communication cost, and the best learning rate on
    both sides. This time is then proportional to the noise ``sum_i s_i^2 tau_i / b_i`` over the
    squared progress ``sum_i s_i tau_i``. For the reference workers every sample counts equally.

    `weighting` gives the scales s_i; `speeds` are samples per second, > 0. `of` marks the reference
    workers, such as the fast ones; at least one.
    """
    rates = [speed / size for speed, size in zip(speeds, batch_sizes, strict=True)]
    # So many that rounding to whole steps is negligible.
    steps = [max(1, round(10_000 * rate / max(rates))) for rate in rates]
    loads = [float(count * size) for count, size in zip(steps, batch_sizes, strict=True)]
    scales = weighting.update_scales(weighting.weights(loads), steps)
    progress = sum(scale * count for scale, count in zip(scales, steps, strict=True))
    each = zip(scales, steps, batch_sizes, strict=True)
    noise = sum(scale**2 * count / size for scale, count, size in each)
    return progress**2 / noise / sum(load for load, own in zip(loads, of, strict=True) if own)


def average_by_load(
    states: Sequence[Mapping[str, AnyArray]], loads: Sequence[Mapping[str, float]]
) -> dict[str, AnyArray]:
    """Average each tensor, by load, over the states that have it.

    The states, tensors by name, are in worker order. Their names may differ, because a worker may
    have trained other parameters. The loads are above 0; each state has one per tensor.
    """
    average: dict[str, AnyArray] = {}
    for name in dict.fromkeys(name for state in states for name in state):
        having = [i for i, state in enumerate(states) if name in state]
        weights = LoadWeighting().weights([loads[i][name] for i in having])
        average |= weighted_average([{name: states[i][name]} for i in having], weights)
    return average
