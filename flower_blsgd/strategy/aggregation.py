"""Average the models of a round into the next global model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from ..algorithm.averaging import AnyArray, Weighting, move, node_weight, weighted_average
from ..algorithm.outer_optimizer import OuterOptimizer
from ..algorithm.own_parts import checked_numbers, checked_weights
from ..grids.array_records import common_runs, flat_like, tensors_of
from .replies import Outcome, once_per_node

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
        of BatchNorm, known by their names. Tied weights have several names in a state dict, but
        one in `named_parameters`: what equals a parameter in all models counts as one.
    """

    weighting: Weighting
    outer_optimizer: OuterOptimizer | None = None
    parameter_names: Collection[str] | None = None

    def next_model(
        self, before: ArrayRecord, outcomes: Sequence[Outcome], average: Average = weighted_average
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
        weights = checked_weights(self.weighting, [outcome.load for outcome in outcomes])
        models, shares = once_per_node(outcomes, weights, lambda reply: reply.tensors)
        parameters: Collection[str] = ()
        if self.weighting.scales_updates or self.outer_optimizer is not None:
            parameters = self._parameters(began, [model for model in models if model])
        if self.weighting.scales_updates:
            steps = [o.report.completed_steps if o.report else 0 for o in outcomes]
            scales = self.weighting.update_scales(weights, steps)
            scales = checked_numbers(self.weighting, "update_scales", scales, len(weights))
            _, scales = once_per_node(outcomes, scales, lambda reply: reply.tensors)
            runs = common_runs(out, began, *models)  # a hundred tensors as one
            to, first, *others = runs or (out, began, *models)
            move(first, others, scales, to)
            buffers = [name for name in out if name not in parameters]
            counted = [(model, share) for model, share in zip(models, shares, strict=True) if model]
            parts = [{name: model[name] for name in buffers} for model, _ in counted]
            if buffers:
                average(parts, [share for _, share in counted], {n: out[n] for n in buffers})
        elif runs := common_runs(out, *models):
            average(runs[1:], shares, runs[0])
        else:
            average(models, shares, out)
        averaged = dict(out)
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

    def _parameters(
        self, model: Mapping[str, AnyArray], trained: Sequence[Mapping[str, AnyArray]] = ()
    ) -> Collection[str]:
        """Return the names of the parameters, those of tied weights by what is equal."""
        moving = {
            name
            for name, tensor in model.items()
            if tensor.dtype.kind in "fc" and name.rpartition(".")[2] not in _RUNNING
        }
        names = self.parameter_names
        if names is None:
            return moving
        tied = {
            other
            for other in moving.difference(names)
            for name in moving.intersection(names)
            if all(np.array_equal(found[other], found[name]) for found in (model, *trained))
        }
        return tied.union(names)
