"""Outer optimizers: how the server applies the averaged update to the global model (DiLoCo)."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .tensor_sum import AnyArray


class OuterOptimizer(Protocol):
    """Rule for the next global model, given the average of a round.

    Subclass it and implement `step`; with state, also `state_dict` and `load_state_dict`.
    """

    def state_dict(self) -> dict[str, AnyArray]:
        """Return a copy of the state, as arrays by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, AnyArray]) -> None:
        """Restore the state; ValueError if it belongs to another optimizer."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state")

    def step(
        self,
        before: Mapping[str, AnyArray],
        averaged: Mapping[str, AnyArray],
        parameters: Collection[str],
    ) -> dict[str, AnyArray]:
        """Return the next global model.

        Parameters
        ----------
        before : mapping
            The global model at the start of the round.
        averaged : mapping
            The average of the workers' models after the round.
        parameters : collection of str
            Names of the parameters. All other tensors, such as BatchNorm's statistics, and integer
            tensors are taken from `averaged`.

        Returns
        -------
        dict
            Tensors with the names, shapes and dtypes of `averaged`. The arguments are not changed.
        """
        ...


@dataclass(frozen=True)
class OuterSGD(OuterOptimizer):
    """SGD with momentum on the averaged update (Douillard et al. 2023, DiLoCo).

    With ``d = averaged - before``, the negative of the outer gradient::

        v <- momentum v + d
        x <- before + learning_rate v                    (Hsu et al. 2019, FedAvgM)
        x <- before + learning_rate (d + momentum v)     (nesterov)

    The DiLoCo paper recommends Nesterov momentum, with learning rate 0.7 and momentum 0.9, for many
    local steps per round. The velocity starts at zero, in float32 or the parameter's wider dtype.
    It is kept in this object, so each run needs a separate one.

    Parameters
    ----------
    learning_rate : float
        > 0; 1 without momentum is the plain average.
    momentum : float (default: 0.0)
        In [0, 1).
    nesterov : bool (default: False)
        Whether to use Nesterov momentum.
    """

    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False
    _velocity: dict[str, AnyArray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"learning_rate = {self.learning_rate} must be a number above 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum = {self.momentum} must be in [0, 1)")

    def state_dict(self) -> dict[str, AnyArray]:
        """Return a copy of the velocity by the names of the parameters."""
        return {name: tensor.copy() for name, tensor in self._velocity.items()}

    def load_state_dict(self, state: Mapping[str, AnyArray]) -> None:
        """Restore the velocity."""
        self._velocity.clear()
        self._velocity.update((name, tensor.copy()) for name, tensor in state.items())

    def step(
        self,
        before: Mapping[str, AnyArray],
        averaged: Mapping[str, AnyArray],
        parameters: Collection[str],
    ) -> dict[str, AnyArray]:
        """Return the next global model, and update the velocity."""
        return {
            name: self._moved(name, before[name], tensor)
            if name in parameters and tensor.dtype.kind in "fc"
            else tensor
            for name, tensor in averaged.items()
        }

    def _moved(self, name: str, before: AnyArray, averaged: AnyArray) -> AnyArray:
        update = averaged.astype(np.result_type(averaged, np.float64))
        update -= before
        if self.momentum > 0:
            if name not in self._velocity:
                narrow = np.result_type(averaged, np.float32)
                self._velocity[name] = np.zeros(averaged.shape, narrow)
            velocity = self._velocity[name]
            velocity *= self.momentum
            velocity += update
            if self.nesterov:
                update += self.momentum * velocity
            else:
                update[...] = velocity
        update *= self.learning_rate
        update += before
        return update.astype(averaged.dtype)


OUTER_OPTIMIZERS: Mapping[str, Callable[[float, float], OuterOptimizer] | None] = {
    "none": None,  # the plain average: FedAvg, and the paper
    "sgd": OuterSGD,
    "nesterov": lambda learning_rate, momentum: OuterSGD(learning_rate, momentum, nesterov=True),
}
"""Constructors by setting name; the arguments are learning rate and momentum."""
