"""One optimizer step for stacked models: SGD with momentum, or AdamW."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..protocol import COUNTERS, SLOTS

Stacked = dict[str, Tensor]
"""Tensors of R models by parameter name, each of shape (R, ...)."""

Rates = npt.NDArray[np.float64]
"""One number for each of the R models."""


class StackedOptimizer:
    """The arithmetic of `torch.optim.SGD` or `torch.optim.AdamW` on R stacked models.

    The same operations in the same order as torch's own, so that the results agree to rounding.
    A parameter without a gradient is left alone, weight decay included, as torch does.

    Parameters
    ----------
    name : {"sgd", "adamw"}
        Which one; AdamW has the betas (0.9, 0.999).
    momentum : float
        Of SGD.
    nesterov : bool
        Of SGD.
    weight_decay : float
        L2 penalty of SGD; decoupled from the gradient with AdamW.
    """

    def __init__(self, name: str, *, momentum: float, nesterov: bool, weight_decay: float) -> None:
        if name not in SLOTS:
            raise ValueError(f"optimizer = {name!r} must be one of {', '.join(map(repr, SLOTS))}")
        self.slots = SLOTS[name]
        """What it keeps of each parameter."""
        self._adamw = name == "adamw"
        self._momentum, self._nesterov, self._decay = momentum, nesterov, weight_decay

    def step(
        self,
        parameters: Stacked,
        gradients: Mapping[str, Tensor | None],
        kept: dict[str, Stacked],
        rates: Rates,
    ) -> None:
        """Move all models by one step.

        Parameters
        ----------
        parameters : dict of str to torch.Tensor
            Changed in place.
        gradients : mapping of str to torch.Tensor or None
            Likewise stacked.
        kept : dict of str to dict
            By slot: what is kept from step to step. Changed in place; what is missing begins with
            zero. Counters are float64 of shape (R,) on the CPU.
        rates : numpy.ndarray
            float64 of shape (R,): the learning rate of each model.
        """
        moved = {n: g for n in parameters if (g := gradients.get(n)) is not None}
        if not moved:
            return
        for slot in self.slots if self._adamw or self._momentum else ():
            stacked = kept.setdefault(slot, {})
            for name in moved:
                if name not in stacked:
                    stacked[name] = (
                        torch.zeros(len(rates), dtype=torch.float64)
                        if slot in COUNTERS
                        else torch.zeros_like(parameters[name], requires_grad=False)
                    )
        with torch.no_grad():
            weights, slopes = [parameters[n] for n in moved], list(moved.values())
            if self._adamw:
                self._step_adamw(list(moved), weights, slopes, kept, rates)
            else:
                self._step_sgd(list(moved), weights, slopes, kept, rates)

    def _step_sgd(
        self,
        names: list[str],
        weights: list[Tensor],
        slopes: list[Tensor],
        kept: dict[str, Stacked],
        rates: Rates,
    ) -> None:
        if self._decay:
            slopes = _lists(torch._foreach_add(slopes, weights, alpha=self._decay))
        if self._momentum:
            buffers = [kept["momentum_buffer"][name] for name in names]
            torch._foreach_mul_(buffers, self._momentum)
            torch._foreach_add_(buffers, slopes)
            if self._nesterov:
                slopes = _lists(torch._foreach_add(slopes, buffers, alpha=self._momentum))
            else:
                slopes = buffers
        _descend(weights, slopes, rates)

    def _step_adamw(
        self,
        names: list[str],
        weights: list[Tensor],
        slopes: list[Tensor],
        kept: dict[str, Stacked],
        rates: Rates,
    ) -> None:
        first, second, epsilon = 0.9, 0.999, 1e-8
        means = [kept["exp_avg"][name] for name in names]
        squares = [kept["exp_avg_sq"][name] for name in names]
        _scale(weights, 1 - rates * self._decay)
        torch._foreach_lerp_(means, slopes, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, slopes, slopes, value=1 - second)
        roots = _lists(torch._foreach_sqrt(squares))
        for members, steps in _counted(names, kept["step"]):
            some = [roots[i] for i in members]
            _scale(some, 1 / np.sqrt(1 - second**steps))
            torch._foreach_add_(some, epsilon)
            directions = _lists(torch._foreach_div([means[i] for i in members], some))
            _descend([weights[i] for i in members], directions, rates / (1 - first**steps))


def _counted(names: list[str], counters: Stacked) -> list[tuple[list[int], Rates]]:
    """Count one step of each parameter; return those together that have equal counts."""
    groups: dict[bytes, list[int]] = {}
    for i, name in enumerate(names):
        counters[name] += 1
        groups.setdefault(counters[name].numpy().tobytes(), []).append(i)
    return [(members, np.frombuffer(raw, np.float64)) for raw, members in groups.items()]


def _descend(weights: list[Tensor], directions: list[Tensor], rates: Rates) -> None:
    if _equal(rates):
        torch._foreach_add_(weights, directions, alpha=-float(rates[0]))
        return
    columns = _columns(rates, weights)
    for weight, direction, column in zip(weights, directions, columns, strict=True):
        weight.addcmul_(direction, column, value=-1)


def _scale(tensors: list[Tensor], factors: Rates) -> None:
    if _equal(factors):
        if factors[0] != 1:
            torch._foreach_mul_(tensors, float(factors[0]))
        return
    for tensor, column in zip(tensors, _columns(factors, tensors), strict=True):
        tensor.mul_(column)


def _columns(factors: Rates, tensors: list[Tensor]) -> list[Tensor]:
    """Return the factors in the form of each tensor, (R, 1, ...)."""
    made: dict[tuple[Any, ...], Tensor] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        if kind not in made:  # converted here, since not every accelerator has float64
            made[kind] = torch.from_numpy(factors).to(tensor.dtype).to(tensor.device)
    return [made[t.dtype, t.device].view(-1, *[1] * (t.ndim - 1)) for t in tensors]


def _equal(factors: Rates) -> bool:
    return bool((factors == factors[0]).all())


def _lists(tensors: tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    return list(tensors)
