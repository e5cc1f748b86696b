"""How one local step is computed, eagerly: the reference for every faster way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .batches import BatchSource
from .micro_batches import in_pieces, pieces_of
from .precision import Precision, autocast

SampleLoss = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) -> one loss per sample, shape (batch_size,)."""

Augment = Callable[[Any, torch.Generator], Any]
"""(inputs of a batch, generator on their device) -> inputs."""


class Steps(Protocol):
    """A way to compute the steps of an order."""

    @property
    def eager(self) -> "EagerSteps":
        """The same computed eagerly."""
        ...

    def is_ready(self, batch_size: int) -> bool:
        """Return whether `prepare` has nothing to compute for it."""
        ...

    def prepare(self, indices: Tensor) -> None:
        """Get ready for batches as large as this one; the model and all else stay as they are."""
        ...

    def seed(self, seed: int) -> None:
        """Begin the random numbers of an order."""
        ...

    def __call__(self, indices: Tensor) -> Tensor:
        """Do one step on these samples; return their losses, which the next step may overwrite."""
        ...

    def release(self) -> None:
        """Give back the memory that is kept from step to step."""
        ...


@dataclass(frozen=True)
class Step:
    """Gather, augment, forward, loss, backward, optimizer.

    Parameters
    ----------
    model : torch.nn.Module
        On its device, in train mode.
    forward : callable
        ``inputs -> outputs``: the model itself, or it compiled.
    source : BatchSource
        Where samples come from.
    loss : callable
        ``(outputs, targets) -> losses`` of shape (batch_size,).
    optimizer : torch.optim.Optimizer
        Of the model.
    device : torch.device
        Where all of this is.
    augment : callable, optional
        ``(inputs, generator) -> inputs``.
    precision : {"float32", "tf32", "bfloat16"} (default: "float32")
        Of the forward pass.
    channels_last : bool (default: False)
        Give the model images whose channels lie next to each other.
    micro_batch_size : int (default: 0)
        Above 0: forward and backward take at most so many samples at a time, and gradients add up
        to that of the mean over the batch. Its samples must not depend on each other, see
        `micro_batches.dependence`.
    """

    model: nn.Module
    forward: Callable[[Any], Any]
    source: BatchSource
    loss: SampleLoss
    optimizer: torch.optim.Optimizer
    device: torch.device
    augment: Augment | None = None
    precision: Precision = "float32"
    channels_last: bool = False
    micro_batch_size: int = 0

    def __call__(
        self, indices: Tensor, generator: torch.Generator, keep_casts: bool = True
    ) -> Tensor:
        """Do it; return the losses before the step, shape (batch_size,)."""
        self.optimizer.zero_grad()
        inputs, targets = self.source.batch(indices)
        if self.augment is not None:
            inputs = self.augment(inputs, generator)
        if self.channels_last and isinstance(inputs, Tensor) and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        size = len(indices)
        if in_pieces(size, self.micro_batch_size):
            parts = []
            for piece, wanted in pieces_of(inputs, targets, self.micro_batch_size):
                losses = self._losses(piece, wanted, len(piece), keep_casts)
                (losses.sum() / size).backward()  # type: ignore[no-untyped-call]
                parts.append(losses.detach())
                del losses  # else what the next piece needs would come on top of it
            detached = torch.cat(parts)
        else:
            losses = self._losses(inputs, targets, size, keep_casts)
            losses.mean().backward()  # type: ignore[no-untyped-call]
            detached = losses.detach()
        self.optimizer.step()
        return detached

    def _losses(self, inputs: Any, targets: Any, size: int, keep_casts: bool) -> Tensor:
        with autocast(self.precision, self.device, keep_casts):
            losses = self.loss(self.forward(inputs), targets)
        if losses.shape != (size,):
            raise ValueError(
                f"the loss must return one value per sample, shape ({size},), not "
                f'{tuple(losses.shape)}; a torch loss does with reduction="none"'
            )
        return losses.float() if losses.dtype == torch.bfloat16 else losses


class EagerSteps:
    """One step after the other, each kernel launched by Python.

    Parameters
    ----------
    step : Step
        What a step is.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._generator = torch.Generator(step.device)

    @property
    def eager(self) -> "EagerSteps":
        """These."""
        return self

    def is_ready(self, batch_size: int) -> bool:
        """Return True."""
        return True

    def prepare(self, indices: Tensor) -> None:
        """Do nothing."""

    def seed(self, seed: int) -> None:
        """Seed what augments; all other random numbers come from torch's default generators."""
        self._generator.manual_seed(seed)

    def __call__(self, indices: Tensor) -> Tensor:
        """Do one step; see `Step`."""
        return self.step(indices, self._generator)

    def release(self) -> None:
        """Forget the gradients."""
        self.step.optimizer.zero_grad()


def brief(error: BaseException) -> str:
    """Return what went wrong first, in one line."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
