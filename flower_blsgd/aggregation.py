"""From the models of a round to the next global model."""

from collections.abc import Callable, Collection, Mapping, Sequence

from flwr.app import Array, ArrayRecord

from .algorithm.averaging import AnyArray, Weighting, moved_by_updates, weighted_average
from .algorithm.nesting import HostRule
from .algorithm.outer_optimizer import OuterOptimizer
from .flat_record import common_runs, flat_like, tensors_of
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
        self._update_norms: list[float] = []
        self._moving: tuple[str, ...] = ()

    def __call__(
        self,
        before: Mapping[str, AnyArray],
        outcomes: Sequence[Outcome],
        average: Average | None = None,
        out: Mapping[str, AnyArray] | None = None,
    ) -> tuple[dict[str, AnyArray], list[float]]:
        """Return the next global model, and each worker's weight.

        Workers behind one node count as one model with their weights added up.

        Parameters
        ----------
        before : mapping
            The global model that the workers began with.
        outcomes : sequence of Outcome
            In worker order; at least one with a load.
        average : callable, optional
            Does the sums instead of `weighted_average`.
        out : mapping, optional
            Tensors of the model's names, shapes and dtypes that the average is written to.
        """
        weights = self.weighting.weights([outcome.load for outcome in outcomes])
        models, shares = _models(outcomes, weights)
        averaged = average(models, shares) if average else average_models(models, shares, out)
        parameters = self._parameters(before)
        scales_of = getattr(self.weighting, "update_scales", None)
        if scales_of is not None:
            steps = [o.report.completed_steps if o.report else 0 for o in outcomes]
            moving = {name: tensor for name, tensor in before.items() if name in parameters}
            scales = scales_of(weights, steps)
            averaged |= moved_by_updates(moving, *_models(outcomes, scales))
        return self._outer_optimizer.step(before, averaged, parameters), weights

    def next_record(
        self, before: ArrayRecord, outcomes: Sequence[Outcome], average: Average | None = None
    ) -> tuple[ArrayRecord, list[float]]:
        """Return the next global model as a record, and each worker's weight.

        On the local grid the average is written where it is sent from.
        """
        record = flat_like(before)
        out = tensors_of(record)
        after, weights = self(tensors_of(before), outcomes, average, out)
        for name, tensor in out.items():
            if after[name] is not tensor:
                tensor[...] = after[name]
        return record, weights

    def host_rule(self, model: Mapping[str, Array], longest_steps: int) -> HostRule:
        """Return how workers behind one node are to be averaged there.

        Parameters
        ----------
        model : mapping
            The global model that they begin with.
        longest_steps : int
            The most that one of them is ordered to do.
        """
        worker_weight = getattr(self.weighting, "worker_weight", "load")
        if not hasattr(self.weighting, "update_scales"):
            return HostRule(worker_weight)
        norm = self.weighting.update_norm  # type: ignore[attr-defined]  # nests() has seen it
        while len(self._update_norms) <= longest_steps:
            self._update_norms.append(float(norm(len(self._update_norms))))
        if not self._moving:
            parameters = self._parameters({name: a.numpy() for name, a in model.items()})
            self._moving = tuple(name for name in model if name in parameters)
        return HostRule(worker_weight, tuple(self._update_norms[: longest_steps + 1]), self._moving)

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
    """Return `weighted_average`, of a few long arrays where the models lie in one piece."""
    if out is not None and (runs := common_runs(out, *models)):  # a hundred tensors as one
        weighted_average(runs[1:], shares, runs[0])
        return dict(out)
    return weighted_average(models, shares, out)


def _models(
    outcomes: Sequence[Outcome], shares: Sequence[float]
) -> tuple[list[Mapping[str, AnyArray]], list[float]]:
    """Return the models that came, in worker order, each with its share of the sum."""
    models: list[Mapping[str, AnyArray]] = []
    sums: list[float] = []
    places: dict[int, int] = {}
    for outcome, share in zip(outcomes, shares, strict=True):
        host = outcome.host
        if host is not None and id(host) in places:
            sums[places[id(host)]] += share
            continue
        if host is not None:
            places[id(host)] = len(models)
        models.append(outcome.tensors if host is None else host.tensors)
        sums.append(share)
    return models, sums
