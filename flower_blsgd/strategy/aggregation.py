"""Average the models of a round into the next global model."""

from collections.abc import Callable, Collection, Mapping, Sequence

from flwr.app import Array, ArrayRecord

from ..algorithm.averaging import (
    AnyArray,
    NodeAveraging,
    Weighting,
    moved_by_updates,
    node_weight,
    weighted_average,
)
from ..algorithm.outer_optimizer import OuterOptimizer
from ..array_records import common_runs, flat_like, tensors_of
from .replies import Outcome, ReceivedModel

Average = Callable[[Sequence[Mapping[str, AnyArray]], Sequence[float]], dict[str, AnyArray]]

_RUNNING = ("running_mean", "running_var")


class Aggregation:
    """Weights, average and outer optimizer of a run.

    Parameters
    ----------
    weighting : Weighting
        Gives each worker its weight.
    outer_optimizer : OuterOptimizer
        Moves the parameters along the averaged update; buffers are averaged only.
    parameter_names : collection of str, optional
        Which tensors are parameters. By default all floating ones but the running statistics
        of BatchNorm, known by their names.
    """

    def __init__(
        self,
        weighting: Weighting,
        outer_optimizer: OuterOptimizer,
        parameter_names: Collection[str] | None = None,
    ) -> None:
        self.weighting = weighting
        self._outer_optimizer = outer_optimizer
        self._parameter_names = parameter_names
        self._update_norms: list[float] = []
        self._moving: tuple[str, ...] = ()

    def next_model(
        self, before: ArrayRecord, outcomes: Sequence[Outcome], average: Average | None = None
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
        average : callable, optional
            Does the sums instead of `weighted_average`.
        """
        record, began = flat_like(before), tensors_of(before)
        out = tensors_of(record)
        weights = self.weighting.weights([outcome.load for outcome in outcomes])
        models, shares = _models(outcomes, weights)
        averaged = average(models, shares) if average else average_models(models, shares, out)
        parameters = self._parameters(began)
        if self.weighting.scales_updates:
            steps = [o.report.completed_steps if o.report else 0 for o in outcomes]
            scales = self.weighting.update_scales(weights, steps)
            moving = {name: tensor for name, tensor in began.items() if name in parameters}
            averaged |= moved_by_updates(moving, *_models(outcomes, scales))
        after = self._outer_optimizer.step(began, averaged, parameters)
        for name, tensor in out.items():
            if after[name] is not tensor:
                tensor[...] = after[name]
        return record, weights

    def node_averaging(self, model: Mapping[str, Array], longest_steps: int) -> NodeAveraging:
        """Return how workers of one node with several devices are to be averaged there.

        Parameters
        ----------
        model : mapping
            The global model that they begin with.
        longest_steps : int
            The most that one of them is ordered to do.
        """
        weighting = self.weighting
        if not weighting.scales_updates:
            return NodeAveraging(node_weight(weighting))
        norms = self._update_norms
        norms += [float(weighting.update_norm(n)) for n in range(len(norms), longest_steps + 1)]
        if not self._moving:
            parameters = self._parameters({name: a.numpy() for name, a in model.items()})
            self._moving = tuple(name for name in model if name in parameters)
        return NodeAveraging(
            node_weight(weighting), tuple(norms[: longest_steps + 1]), self._moving
        )

    def _parameters(self, model: Mapping[str, AnyArray]) -> Collection[str]:
        if self._parameter_names is None:
            self._parameter_names = {
                name
                for name, tensor in model.items()
                if tensor.dtype.kind in "fc" and name.rpartition(".")[2] not in _RUNNING
            }
        return self._parameter_names


def average_models(
    models: Sequence[Mapping[str, AnyArray]],
    shares: Sequence[float],
    out: Mapping[str, AnyArray] | None = None,
) -> dict[str, AnyArray]:
    """Return `weighted_average`, of a few long arrays where each model is one flat buffer."""
    if out is not None and (runs := common_runs(out, *models)):  # a hundred tensors as one
        weighted_average(runs[1:], shares, runs[0])
        return dict(out)
    return weighted_average(models, shares, out)


def _models(
    outcomes: Sequence[Outcome], shares: Sequence[float]
) -> tuple[list[Mapping[str, AnyArray]], list[float]]:
    """Return the models of a round in worker order, each with its share of the sum."""
    sums: dict[ReceivedModel, float] = {}
    for outcome, share in zip(outcomes, shares, strict=True):
        if outcome.model is not None:
            sums[outcome.model] = sums.get(outcome.model, 0.0) + share
    return [model.tensors for model in sums], list(sums.values())
