"""One local step on a batch: augment, forward pass, loss, backward pass, optimizer."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..devices.worker_spec import Precision
from ..errors import is_out_of_memory
from ..protocol import MOST_SKIPS
from .batches import channels_last_images, inputs_and_targets, map_tensors, micro_batches
from .step import (
    LOSS_SCALE,
    Augment,
    LossScaler,
    SampleLoss,
    augmented,
    autocast,
    preserve_training_state,
    takes_model,
    widened,
)

_LOG = logging.getLogger(__name__)

_CUDA_GRAPH_STEPS = 3
"""Steps in which torch warms up, captures and replays a CUDA graph of a new shape."""


class LocalStep:
    """Local steps of a model with its optimizer; the arguments are those of `LocalSGD`.

    `skipped` counts the steps whose gradients overflowed in float16.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: SampleLoss,
        device: torch.device,
        *,
        augment: Augment | None,
        precision: Precision,
        clip_norm: float,
        micro_batch_size: int,
        channels_last: bool,
        compile: bool,
        name: str,
    ) -> None:
        self.optimizer = optimizer
        self.precision = precision
        self.scaler = LossScaler(device) if precision == "float16" else None
        self.micro_batch_size = micro_batch_size
        self.skipped = 0
        self._name = name
        self._model = model
        self._loss = loss if takes_model(loss) else _of_pair(loss)
        self._augment = augment
        self._clip_norm = clip_norm
        self._channels_last = channels_last
        self._generator = torch.Generator(device)
        self._compile_mode = compile_mode(device, micro_batch_size)
        self._compiled_sizes: set[int] = set()
        self._forward: Callable[..., Any] = model
        if compile:
            self._forward = torch.compile(model, mode=self._compile_mode)

    @property
    def _device(self) -> torch.device:
        return self._generator.device

    def seed(self, seed: int) -> None:
        """Seed the generators of the steps."""
        # torch.manual_seed searches for all kinds of devices, which takes half a millisecond.
        on_cpu = self._device.type == "cpu"
        (torch.default_generator if on_cpu else torch).manual_seed(seed)
        self._generator.manual_seed(seed)

    def run(self, batch: Any, size: int, weights: Tensor | None = None) -> Tensor:
        """Run one step on a batch of `size` samples: augment, forward, loss, backward, optimizer.

        Returns the losses of `gradient`.
        """
        losses = self.gradient(batch, size, weights)
        self.update()
        return losses

    def gradient(self, batch: Any, size: int, weights: Tensor | None = None) -> Tensor:
        """Compute the gradient of a batch, which is finite in float16; return its losses.

        The gradient is that of the mean of the weighted losses. It is not divided by the sum of the
        weights, because the weights stand for samples that were left out. The returned losses are
        unweighted, before the step, of shape (batch_size,). If the loss returns the model's
        outputs, the next step of a compiled model may overwrite them.
        """
        if self._augment is not None:
            batch = augmented(self._augment, batch, self._generator)
        if self._channels_last:
            batch = map_tensors(batch, channels_last_images)
        for _ in range(MOST_SKIPS):
            losses = self._backward(batch, size, weights)
            if self.scaler is None or self.scaler.unscale(self.optimizer):
                return losses
            self.skipped += 1
        raise ValueError(
            f"the gradients overflow in float16 even with a loss scale of {LOSS_SCALE} / 2^"
            f"{MOST_SKIPS}; use a smaller learning rate, or precision = bfloat16 or float32"
        )

    def _backward(self, batch: Any, size: int, weights: Tensor | None) -> Tensor:
        """Compute the gradient of a batch; return its losses."""
        self.optimizer.zero_grad()
        if not 0 < self.micro_batch_size < size:
            losses = self._losses(batch, size)
            self._backpropagate((losses if weights is None else losses * weights).mean())
            return losses.detach()
        parts, done = [], 0
        for some, count in micro_batches(batch, size, self.micro_batch_size):
            losses = self._losses(some, count)
            parts.append(losses.detach())
            if weights is not None:
                losses = losses * weights[done : done + count]
            self._backpropagate(losses.sum() / size)
            done += count
            del losses  # frees its graph before the next micro-batch
        return torch.cat(parts)

    def _backpropagate(self, loss: Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scaled(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Clip the gradient and run the optimizer."""
        if self._clip_norm > 0:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        self.optimizer.step()

    def _losses(self, batch: Any, size: int) -> Tensor:
        with autocast(self.precision, self._device):
            losses = self._loss(self._forward, batch)
        if losses.shape != (size,):
            raise ValueError(
                f"the loss must return one value per sample, shape ({size},), not "
                f'{tuple(losses.shape)}; for a torch loss, set reduction="none"'
            )
        return widened(losses)

    # --- steps without effect

    def compile_for(self, size: int, make_batch: Callable[[], Any]) -> None:
        """Compile the model for batches of this size if requested.

        Compiling can fail for many reasons: no compiler, no Triton, an unsupported model. Because
        the eager results are the same up to rounding, a failure is logged and does not end the run.
        """
        if self._forward is self._model or size in self._compiled_sizes:
            return
        self._compiled_sizes.add(size)
        try:
            with self._trial():
                batch = make_batch()
                for _ in range(_CUDA_GRAPH_STEPS if self._compile_mode else 1):
                    self.run(batch, size)
        except Exception as error:  # compilers raise many; the eager step repeats a model error
            if is_out_of_memory(error):
                raise
            self._forward = self._model
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            cause = f"{type(first).__name__}: {first}".strip().splitlines()[0]
            _LOG.warning("worker %s: torch.compile failed; running eagerly: %s", self._name, cause)

    def try_eagerly(self, batch: Any, size: int, micro_batch_size: int) -> None:
        """Run a step without the compiled model, whose effect is undone."""
        before = self._forward, self.micro_batch_size
        self._forward, self.micro_batch_size = self._model, micro_batch_size
        try:
            with self._trial():
                self.run(batch, size)
        finally:
            self._forward, self.micro_batch_size = before

    @contextlib.contextmanager
    def _trial(self) -> Iterator[None]:
        """Undo what a step inside the block changes."""
        scale, skipped = self.scaler.state if self.scaler else None, self.skipped
        try:
            with preserve_training_state(self._model, self.optimizer):
                yield
        finally:
            self.skipped = skipped
            if self.scaler is not None:
                self.scaler.load(scale)


def _of_pair(loss: SampleLoss) -> SampleLoss:
    """Return a loss of outputs and targets as one of the model and a batch."""

    def of_batch(model: Callable[[Any], Any], batch: Any) -> Tensor:
        inputs, targets = inputs_and_targets(batch)
        return loss(model(inputs), targets)

    return of_batch


def compile_mode(device: torch.device, micro_batch_size: int) -> str | None:
    """Return the mode of torch.compile: on CUDA the one with CUDA graphs, else torch's default.

    With micro-batches, a step adds up gradients over several calls of the model. torch does not
    allow this with CUDA graphs, because each call overwrites the gradients of the previous one.
    """
    return "reduce-overhead" if device.type == "cuda" and micro_batch_size == 0 else None
