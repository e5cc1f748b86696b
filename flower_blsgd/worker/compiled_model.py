"""torch.compile as something that may fail without ending the run."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from .rehearsal import rehearsal
from .steps import EagerSteps, Step, brief

_LOG = logging.getLogger(__name__)


class CompiledModel:
    """A model's forward pass, compiled until that turns out to fail.

    Parameters
    ----------
    model : torch.nn.Module
        Keeps its own weights: they are shared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._compiled: Any = torch.compile(model)

    @property
    def compiled(self) -> bool:
        """Whether it still is."""
        return self._compiled is not None

    def __call__(self, inputs: Any) -> Any:
        """Return the outputs."""
        return self._model(inputs) if self._compiled is None else self._compiled(inputs)

    def give_up(self) -> None:
        """Call the model itself from now on."""
        self._compiled = None


class CompiledSteps(EagerSteps):
    """Steps with a compiled model; with the model itself where torch cannot compile it.

    Compiling fails for many reasons (no compiler, no Triton, a model that it does not understand),
    and the results are the same without it up to rounding: so that costs one line in the log and
    not the run.

    Parameters
    ----------
    step : Step
        With a `CompiledModel` as its forward pass.
    name : str
        How the log calls this worker.
    """

    def __init__(self, step: Step, name: str) -> None:
        super().__init__(step)
        self._name = name
        self._tried: set[int] = set()

    def is_ready(self, batch_size: int) -> bool:
        """Return whether it was compiled for this batch size, or cannot be."""
        return batch_size in self._tried or not self._model.compiled

    def prepare(self, indices: Tensor) -> None:
        """Compile for this batch size, by a step that leaves no trace."""
        if self.is_ready(len(indices)):
            return
        try:
            with rehearsal(self.step.model, self.step.optimizer):
                self(indices)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler's many; a mistake in the model shows up again
            self._model.give_up()
            _LOG.warning(
                "worker %s: compile = true did not work, it goes on without: %s",
                self._name,
                brief(error),
            )
        self._tried.add(len(indices))

    @property
    def _model(self) -> CompiledModel:
        assert isinstance(self.step.forward, CompiledModel)
        return self.step.forward
