"""Average the models of a round into the next global model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord

from ..algorithm.averaging import (
    AnyArray,
    Weighting,
    moved_by_updates,
    node_weight,
    weighted_average,
)
from ..algorithm.outer_optimizer import OuterOptimizer
from ..array_records import common_runs, flat_like, tensors_of
from .replies import Outcome

Average = Callable[..., dict[str, AnyArray]]
"""A function with the arguments of `weighted_average`."""

_RUNNING = ("running_mean", "running_var")


@dataclass
class Aggregation:
    """Weights, average and outer optimizer of a run.

    Parameters
    ----------
    weighting : Weighting
        Gives each worker its weight.
    outer_optimizer : OuterOptimizer, optional
        Moves the parameters along the averaged update; buffers are averaged only.
    parameter_names : collection of str, optional
        Which tensors are parameters. By default all floating ones but the running statistics
        of BatchNorm, known by their names.
    """

    weighting: Weighting
    outer_optimizer: OuterOptimizer | None = None
    parameter_names: Collection[str] | None = None

    def next_model(
        self,
        before: ArrayRecord,
        outcomes: Sequence[Outcome],
        average: Average = weighted_average,
    ) -> tuple[ArrayRecord, list[float]]:
        """Return the next global model, and each worker's weight.

        Workers of one node with several devices count as one model with the sum of their weights.
        On the local grid the average is written where it is sent from.

        Parameters
        ----------
        before : ArrayRecord
            The global model that the workers began with.
        outcomes : sequence of Outcome
            In worker order; at least one with a load.
        average : callable (default: weighted_average)
            Does the sums.
        """
        record, began = flat_like(before), tensors_of(before)
        out = tensors_of(record)
        weights = self.weighting.weights([outcome.load for outcome in outcomes])
        models, shares = _models(outcomes, weights)
        averaged = average_models(models, shares, out, average)
        parameters = self._parameters(began)
        if self.weighting.scales_updates:
            steps = [o.report.completed_steps if o.report else 0 for o in outcomes]
            scales = self.weighting.update_scales(weights, steps)
            moving = {name: tensor for name, tensor in began.items() if name in parameters}
            averaged |= moved_by_updates(moving, *_models(outcomes, scales))
        if self.outer_optimizer is not None:
            averaged = self.outer_optimizer.step(began, averaged, parameters)
        for name, tensor in out.items():
            if averaged[name] is not tensor:
                tensor[...] = averaged[name]
        return record, weights

    def at_nodes(self, model: Mapping[str, Array], longest_steps: int) -> dict[str, Any]:
        """Return how models of one node with several devices are averaged, for `HostOrders`.

        Parameters
        ----------
        model : mapping
            The global model that they begin with.
        longest_steps : int
            The most that one of its workers is ordered to do.
        """
        rule: dict[str, Any] = {"worker_weight": node_weight(self.weighting)}
        if self.weighting.scales_updates:
            norms = map(self.weighting.update_norm, range(longest_steps + 1))
            parameters = self._parameters({name: array.numpy() for name, array in model.items()})
            rule["update_norms"] = [float(norm) for norm in norms]
            rule["moving"] = [name for name in model if name in parameters]
        return rule

    def _parameters(self, model: Mapping[str, AnyArray]) -> Collection[str]:
        if self.parameter_names is None:
            self.parameter_names = {
                name
                for name, tensor in model.items()
                if tensor.dtype.kind in "fc" and name.rpartition(".")[2] not in _RUNNING
            }
        return self.parameter_names


def average_models(
    models: Sequence[Mapping[str, AnyArray]],
    shares: Sequence[float],
    out: Mapping[str, AnyArray],
    average: Average = weighted_average,
) -> dict[str, AnyArray]:
    """Return the average, of a few long arrays where each model is one flat buffer."""
    if runs := common_runs(out, *models):  # a hundred tensors as one
        average(runs[1:], shares, runs[0])
        return dict(out)
    return average(models, shares, out)


def _models(
    outcomes: Sequence[Outcome], shares: Sequence[float]
) -> tuple[list[Mapping[str, AnyArray]], list[float]]:
    """Return the models of a round in worker order, each with its share of the sum."""
    models: dict[int, Mapping[str, AnyArray]] = {}
    sums: dict[int, float] = {}
    for outcome, share in zip(outcomes, shares, strict=True):
        if outcome.reply is not None:
            key = id(outcome.reply.tensors)  # the same of all workers of one node
            models[key] = outcome.reply.tensors
            sums[key] = sums.get(key, 0.0) + share
    return list(models.values()), list(sums.values())
