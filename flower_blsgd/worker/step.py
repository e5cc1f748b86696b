"""One local step: gather, augment, forward, loss, backward, optimizer.

`Step` is the computation. `Steps` is a way to repeat it: it launches every kernel from Python and
is the reference, `CompiledSteps` compiles the model first, `cuda_graph.GraphedSteps` replays a
captured step.
"""

import contextlib
import dataclasses
import logging
import platform
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ..errors import UsageError
from .batches import BatchSource

_LOG = logging.getLogger(__name__)

SampleLoss = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) -> one loss per sample, shape (batch_size,)."""

Augment = Callable[[Any, torch.Generator], Any]
"""(inputs of a batch, generator on their device) -> inputs."""

Precision = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

_FAST_ON_CPU = ("avx512_bf16", "amx_bf16", "bf16")
"""Processors with one of these multiply bfloat16 faster than float32; as torch names them."""


@dataclass(frozen=True)
class Step:
    """Gather, augment, forward, loss, backward, optimizer; `LocalSGD` explains the settings.

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
    augment : callable or None
        ``(inputs, generator) -> inputs``.
    precision : {"float32", "tf32", "bfloat16"}
        Of the forward pass.
    channels_last : bool
        Give the model images whose channels lie next to each other.
    micro_batch_size : int
        Above 0: forward and backward take at most so many samples at a time, and gradients add up
        to that of the mean over the batch.
    """

    model: nn.Module
    forward: Callable[[Any], Any]
    source: BatchSource
    loss: SampleLoss
    optimizer: torch.optim.Optimizer
    device: torch.device
    augment: Augment | None
    precision: Precision
    channels_last: bool
    micro_batch_size: int

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
        if 0 < self.micro_batch_size < size:
            parts = []
            for some, their_targets in micro_batches(inputs, targets, self.micro_batch_size):
                losses = self._losses(some, their_targets, len(some), keep_casts)
                (losses.sum() / size).backward()  # type: ignore[no-untyped-call]
                parts.append(losses.detach())
                del losses  # else its graph would be kept beside that of the next micro-batch
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


# --- ways to repeat it


class Steps:
    """A way to compute the steps of an order; this one launches every kernel from Python."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._generator = torch.Generator(step.device)

    @property
    def eager(self) -> "Steps":
        """The same computed eagerly."""
        return self

    def prepare(self, indices: Tensor) -> None:
        """Get ready for batches as large as this one; the model and all else stay as they are."""

    def seed(self, seed: int) -> None:
        """Seed what augments; all other random numbers come from torch's default generators."""
        self._generator.manual_seed(seed)

    def __call__(self, indices: Tensor) -> Tensor:
        """Do one step on these samples; return their losses, which the next step may overwrite."""
        return self.step(indices, self._generator)

    def release(self) -> None:
        """Give back the memory that is kept from step to step."""
        self.step.optimizer.zero_grad()


class CompiledSteps(Steps):
    """Steps with a compiled model; with the model itself where torch cannot compile it.

    Compiling fails for many reasons (no compiler, no Triton, a model that it does not understand),
    and the results are the same without it up to rounding: so that costs one line in the log and
    not the run.

    Parameters
    ----------
    step : Step
        What a step is, with the model itself.
    name : str
        How the log calls this worker.
    """

    def __init__(self, step: Step, name: str) -> None:
        super().__init__(dataclasses.replace(step, forward=torch.compile(step.model)))
        self._plain, self._name = step, name
        self._tried: set[int] = set()

    def prepare(self, indices: Tensor) -> None:
        """Compile for this batch size, by a step that is undone; nothing if that is done."""
        if len(indices) in self._tried or self.step is self._plain:
            return
        self._tried.add(len(indices))
        try:
            with undone(self.step.model, self.step.optimizer):
                self(indices)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler's many; a mistake in the model shows up again
            self.step = self._plain
            _LOG.warning(
                "worker %s: compile = true did not work, it goes on without: %s",
                self._name,
                first_line(error),
            )


def first_line(error: BaseException) -> str:
    """Return what went wrong first, in one line."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


# --- steps that are undone


@contextlib.contextmanager
def undone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo what training steps inside the block change, in place.

    That is the model's parameters and buffers, the optimizer's state, the gradients, and all
    global random numbers. Tensors keep their addresses: a captured graph works on them. Where
    the model puts a new tensor in the place of a buffer, the old one comes back. The copies wait in
    the host's memory: the device's may be what there is too little of.
    """
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [kept for kept in state.values() if isinstance(kept, Tensor)]
    before = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    known = set(optimizer.state)
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    host = host_randomness()
    cards = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
        random.setstate(host[1])
        np.random.set_state(host[2])
        optimizer.zero_grad(set_to_none=True)
        for module, own in buffers:
            module._buffers.update(own)
        with torch.no_grad():
            for tensor, copied in before:
                tensor.copy_(copied)
        for parameter in set(optimizer.state) - known:
            del optimizer.state[parameter]


def host_randomness() -> tuple[bytes, Any, Any]:
    """Return the states of the host's global generators: torch's, Python's and numpy's."""
    return torch.random.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()


def same_randomness(one: tuple[bytes, Any, Any], other: tuple[bytes, Any, Any]) -> bool:
    """Return whether nothing was drawn between two states of `host_randomness`."""
    return one[:2] == other[:2] and all(
        np.array_equal(a, b) for a, b in zip(one[2], other[2], strict=True)
    )


# --- micro-batches


def micro_batches(inputs: Any, targets: Any, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of each micro-batch of at most `size` samples, in order.

    They differ in size by one at most.

    Raises
    ------
    ValueError
        If inputs or targets are no tensor.
    """
    for name, part in (("inputs", inputs), ("targets", targets)):
        if not isinstance(part, Tensor):
            raise ValueError(
                f"micro-batch-size = {size}: the {name} of a batch are a "
                f"{type(part).__name__}, and only tensors can be cut; leave it at 0"
            )
    count = -(-len(inputs) // size)
    yield from zip(
        torch.tensor_split(inputs, count), torch.tensor_split(targets, count), strict=True
    )


def check_micro_batches(model: nn.Module, size: int) -> None:
    """Refuse to cut the batch of a model whose samples depend on each other; 0 cuts nothing.

    Raises
    ------
    UsageError
        If the model has a module such as BatchNorm, see `batch_dependent_module`.
    """
    if size < 0:
        raise UsageError(f"micro-batch-size = {size} must be at least 0")
    if size > 0 and (module := batch_dependent_module(model)):
        raise UsageError(
            f"micro-batch-size = {size}: {module} of the model takes its statistics from "
            "the whole batch, so micro-batches would give another result; leave it at 0 and make "
            "batch-size smaller, or use a model without BatchNorm"
        )


def batch_dependent_module(model: nn.Module) -> str:
    """Return the first module through which samples of a batch change each other, in words.

    Such are BatchNorm and everything made from it, and InstanceNorm that tracks statistics. Empty
    if there is none. Modules of one's own that do so cannot be seen.
    """
    for name, module in model.named_modules():
        tracks = isinstance(module, _InstanceNorm) and module.track_running_stats
        if isinstance(module, _BatchNorm) or tracks:
            return f"{type(module).__name__} ({name})" if name else type(module).__name__
    return ""


# --- precision


def use_precision(precision: str, device: str | torch.device) -> None:
    """Set what CUDA does with float32 matrices and convolutions, in the whole process.

    torch keeps this per process, and convolutions begin with TF32 allowed: 10 bits of mantissa,
    which is not what ``"float32"`` says. It is not put back, since workers that compute side by
    side in threads would put it back under each other; they all have the same setting.
    """
    if torch.device(device).type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(
    precision: Precision, device: torch.device, keep_casts: bool = True
) -> contextlib.AbstractContextManager[object]:
    """Return what the forward pass and the loss are computed in.

    With bfloat16 torch casts the inputs of matrix products and convolutions; weights stay float32,
    and so do sums and losses. With `keep_casts` a weight is cast once for all its uses. Not inside
    a captured graph: a cast that outlives the capture would be of old weights.
    """
    if precision != "bfloat16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=keep_casts)


def check_precision(precision: str, device: torch.device) -> Precision:
    """Return the precision if this device can compute so.

    One line in the log tells where a CPU only emulates bfloat16, slower than float32.

    Raises
    ------
    UsageError
        If there is no such precision, or not on this kind of device.
    """
    if precision not in PRECISIONS:
        known = ", ".join(map(repr, PRECISIONS))
        raise UsageError(f"precision = {precision!r} must be one of {known}")
    if precision == "bfloat16" and not torch.amp.is_autocast_available(device.type):
        raise UsageError(
            f'precision = "bfloat16" does not work on {device.type}; use "float32" there'
        )
    if precision == "bfloat16" and device.type == "cpu" and not _cpu_has_bfloat16():
        _LOG.warning(
            'precision = "bfloat16": this CPU (%s) has no instructions for it and emulates it, '
            'slower than "float32"',
            platform.processor() or platform.machine(),
        )
    return precision


def _cpu_has_bfloat16() -> bool:
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.11 cannot say
        return True
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _FAST_ON_CPU)
