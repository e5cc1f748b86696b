"""Averages that nest: the workers of one host are averaged there, then the hosts.

With the server's weights w_i, scales s_i, and relative ones that differ from them by a factor of
each host only, ``sum_i w_i x_i = sum_h (sum_{i in h} w_i) x_h``: the server needs no more of a
host's models than their average x_h. The same holds for ``x + sum_i s_i (x_i - x)``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .averaging import AnyArray, EqualWeighting, LoadWeighting, Weighting, weighted_average

_WEIGHTS: Mapping[str, Callable[[Sequence[float]], list[float]]] = {
    "load": LoadWeighting().weights,
    "equal": EqualWeighting().weights,
}

_PROBE_LOADS, _PROBE_STEPS = (6.0, 2.0, 0.0, 20.0), (3, 1, 0, 5)
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class HostRule:
    """How the workers of one host are averaged there.

    Parameters
    ----------
    worker_weight : {"load", "equal"} (default: "load")
        What a worker's weight is proportional to; one that completed nothing counts 0.
    update_norms : tuple of float (default: ())
        By completed steps, from 0 on: the tensors in `moving` count with the weight over this.
    moving : tuple of str (default: ())
        Names of the tensors that move by scaled updates; all others count with the weight.
    """

    worker_weight: str = "load"
    update_norms: tuple[float, ...] = ()
    moving: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.worker_weight not in _WEIGHTS:
            raise ValueError(
                f"worker weight {self.worker_weight!r} must be one of {', '.join(_WEIGHTS)}"
            )

    def average(
        self,
        models: Sequence[Mapping[str, AnyArray]],
        loads: Sequence[float],
        completed_steps: Sequence[int],
    ) -> dict[str, AnyArray]:
        """Return the one model that stands for these.

        Parameters
        ----------
        models : sequence of mapping
            In worker order.
        loads : sequence of float
            Of each; at least one above 0.
        completed_steps : sequence of int
            Of each.

        Raises
        ------
        ValueError
            If all loads are 0.
        """
        weights = _WEIGHTS[self.worker_weight](loads)
        if not self.moving:
            return weighted_average(models, weights)
        scales = [
            weight / self.update_norms[steps] if weight else 0.0
            for weight, steps in zip(weights, completed_steps, strict=True)
        ]
        total = sum(scales)
        moving = [{name: model[name] for name in self.moving} for model in models]
        moved = weighted_average(moving, [scale / total for scale in scales])
        others = [{n: t for n, t in model.items() if n not in moved} for model in models]
        averaged = weighted_average(others, weights) | moved
        return {name: averaged[name] for name in models[0]}


def nests(weighting: Weighting) -> bool:
    """Return whether the average of hosts' averages is that of all workers.

    What the weighting says of itself is tried out: a subclass may weight in another way and not
    say so.
    """
    rule = _WEIGHTS.get(getattr(weighting, "worker_weight", ""))
    if rule is None:
        return False
    weights = weighting.weights(_PROBE_LOADS)
    if not _proportional(weights, rule(_PROBE_LOADS)):
        return False
    scales_of = getattr(weighting, "update_scales", None)
    if scales_of is None:
        return True
    norm = getattr(weighting, "update_norm", None)
    if norm is None:
        return False
    expected = [w / norm(s) if w else 0.0 for w, s in zip(weights, _PROBE_STEPS, strict=True)]
    return _proportional(scales_of(weights, _PROBE_STEPS), expected)


def _proportional(values: Sequence[float], others: Sequence[float]) -> bool:
    one, other = sum(values), sum(others)
    return all(
        abs(value / one - second / other) < _TOLERANCE
        for value, second in zip(values, others, strict=True)
    )


def average_by_load(
    states: Sequence[Mapping[str, AnyArray]], loads: Sequence[Mapping[str, float]]
) -> tuple[dict[str, AnyArray], dict[str, float]]:
    """Average each tensor over those that have it, by load.

    Parameters
    ----------
    states : sequence of mapping
        Tensors by name, in worker order; names may differ, since a worker may have trained other
        parameters.
    loads : sequence of mapping
        Of each state, the load that stands behind each of its tensors, above 0.

    Returns
    -------
    tuple of dict
        The averages, and the load behind each: with these they can be averaged again.
    """
    names = dict.fromkeys(name for state in states for name in state)
    behind: dict[str, float] = {}
    # Tensors with the same loads behind them are averaged together: mostly that is all of them.
    alike: dict[tuple[float, ...], list[str]] = {}
    for name in names:
        shares = tuple(
            load[name] if name in state else 0.0 for state, load in zip(states, loads, strict=True)
        )
        alike.setdefault(shares, []).append(name)
        behind[name] = sum(shares)
    average: dict[str, AnyArray] = {}
    for shares, chosen in alike.items():
        having = [
            ({name: state[name] for name in chosen}, share)
            for state, share in zip(states, shares, strict=True)
            if share
        ]
        weights = LoadWeighting().weights([share for _, share in having])
        average |= weighted_average([model for model, _ in having], weights)
    return {name: average[name] for name in names}, behind
