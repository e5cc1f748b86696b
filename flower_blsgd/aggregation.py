"""From the models of a round to the next global model."""

from collections.abc import Callable, Collection, Mapping, Sequence

from .algorithm.averaging import AnyArray, Weighting, moved_by_updates, weighted_average
from .algorithm.outer_optimizer import OuterOptimizer
from .round_replies import Outcome

Average = Callable[[Sequence[Mapping[str, AnyArray]], Sequence[float]], dict[str, AnyArray]]

_RUNNING = ("running_mean", "running_var")


class Aggregation:
    """Weights, average and outer optimizer of a run.

    Parameters
    ----------
    weighting : Weighting
        Who counts how much.
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

    def __call__(
        self,
        before: Mapping[str, AnyArray],
        outcomes: Sequence[Outcome],
        average: Average | None = None,
    ) -> tuple[dict[str, AnyArray], list[float]]:
        """Return the next global model, and each worker's weight.

        Parameters
        ----------
        before : mapping
            The global model that the workers began with.
        outcomes : sequence of Outcome
            In worker order; at least one with a load.
        average : callable, optional
            Does the sums instead of `weighted_average`.
        """
        weights = self.weighting.weights([outcome.load for outcome in outcomes])
        models = [outcome.tensors for outcome in outcomes]
        averaged = (average or weighted_average)(models, weights)
        parameters = self._parameters(before)
        scales_of = getattr(self.weighting, "update_scales", None)
        if scales_of is not None:
            steps = [o.report.completed_steps if o.report else 0 for o in outcomes]
            moving = {name: tensor for name, tensor in before.items() if name in parameters}
            averaged |= moved_by_updates(moving, models, scales_of(weights, steps))
        return self._outer_optimizer.step(before, averaged, parameters), weights

    def _parameters(self, model: Mapping[str, AnyArray]) -> Collection[str]:
        if self._parameter_names is None:
            self._parameter_names = {
                name
                for name, tensor in model.items()
                if tensor.dtype.kind in "fc" and name.rpartition(".")[2] not in _RUNNING
            }
        return self._parameter_names
