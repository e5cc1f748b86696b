"""Evaluation of the averaged model with the script's function."""

import contextlib
import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from ..protocol import EvaluateOrder, EvaluateReport
from ..worker.model_io import load_state
from ..worker.step import fork_rng

_LOG = logging.getLogger(__name__)

Figures = Mapping[str, float]


class Evaluation:
    """The script's function, and how often and by which figure models are compared.

    `every` is the number of samples between two evaluations.
    """

    def __init__(
        self, function: Callable[[nn.Module], Figures], every: int, metric: str, mode: str
    ) -> None:
        self.every = every
        self.metric = metric or "accuracy"
        self.mode = mode or ("min" if "loss" in self.metric else "max")
        self._function = function
        self._left_out: set[object] = set()

    def report(
        self, model: nn.Module, device: torch.device, order: EvaluateOrder
    ) -> EvaluateReport:
        """Evaluate the model of an order; training continues as if nothing had happened."""
        modes = [(module, module.training) for module in model.modules()]
        load_state(model, order.arrays)
        with fork_rng(device):
            model.eval()
            try:
                found = self._function(model)
            finally:
                for module, was_training in modes:  # a frozen part may be in eval mode
                    module.training = was_training
        figures = self._numbers(found)
        return EvaluateReport(
            order.first,
            order.last,
            loss_sums=[figures.get("loss", math.nan)],
            metric_sums=list(figures.values()),
            metric_names=list(figures),
        )

    def _numbers(self, found: object) -> dict[str, float]:
        """Return the figures that are numbers; warn once about each other one."""
        numbers = {}
        for name, value in found.items() if isinstance(found, Mapping) else ():
            with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
                numbers[str(name)] = float("" if isinstance(value, str | bytes) else value)
            if str(name) not in numbers and name not in self._left_out:
                self._left_out.add(name)
                _LOG.warning("session.evaluate: %r is left out: it is not a number", name)
        return numbers
