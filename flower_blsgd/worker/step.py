"""Parts of a local step: functions of a task, micro-batches, precision, restoring the state."""

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ..devices.machine import accelerator_of
from ..devices.worker_spec import PRECISIONS, Precision
from ..errors import UsageError

SampleLoss = Callable[[Any, Any], Tensor]
"""``(outputs, targets)`` or ``(model, batch)`` -> one loss per sample, shape (batch_size,).

A function whose first parameter is called ``model`` gets the model and the whole batch. Any other
one gets the model's outputs and the targets; batches are then pairs (inputs, targets).
"""

Augment = Callable[[Any, torch.Generator], Any]
"""``(inputs, generator) -> inputs`` of a batch that is a pair; ``(batch, generator) -> batch`` of
another one. The generator is on the batch's device.
"""


# --- the task's functions on a batch


def takes_model(function: SampleLoss) -> bool:
    """Return whether a loss or metric gets the model and the whole batch."""
    try:
        return next(iter(inspect.signature(function).parameters), "") == "model"
    except ValueError:  # some functions of C have no signature
        return False


def augmented(augment: Augment, batch: Any, generator: torch.Generator) -> Any:
    """Return a training batch with random changes."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return augment(batch[0], generator), batch[1]
    return augment(batch, generator)


# --- micro-batches


def check_micro_batches(model: nn.Module, size: int) -> None:
    """Raise UsageError for micro-batches of a model in which samples depend on each other.

    See `batch_dependent_module`. A size of 0 means no micro-batches.
    """
    if size < 0:
        raise UsageError(f"micro-batch-size = {size} must be at least 0")
    if size > 0 and (module := batch_dependent_module(model)):
        raise UsageError(
            f"micro-batch-size = {size}: {module} of the model computes its statistics from "
            "the whole batch, so micro-batches would change the result; set it to 0 and use a "
            "smaller batch-size, or use a model without BatchNorm"
        )


def batch_dependent_module(model: nn.Module) -> str:
    """Return the name of the first module through which samples of a batch affect each other.

    These are BatchNorm, its subclasses, and InstanceNorm with running statistics. Empty if the
    model has none. Custom modules of this kind cannot be detected.
    """
    for name, module in model.named_modules():
        tracks = isinstance(module, _InstanceNorm) and module.track_running_stats
        if isinstance(module, _BatchNorm) or tracks:
            return f"{type(module).__name__} ({name})" if name else type(module).__name__
    return ""


# --- precision


_SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def use_precision(precision: str, device: str | torch.device) -> None:
    """Allow TF32 on CUDA with ``"tf32"``, and forbid it with ``"ieee"``, for the whole process.

    The other precisions leave torch's flags alone. The previous value is not restored, because
    workers in parallel threads would restore it for each other.
    """
    if torch.device(device).type == "cuda" and precision in ("tf32", "ieee"):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


LOSS_SCALE = 65_536.0
"""Scale of the loss in float16 at the start, as in torch."""


class LossScaler:
    """Scale of the loss in float16, whose gradients would otherwise become zero.

    torch's GradScaler, with a state of two numbers: the scale, and the steps since it last changed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.load(None)

    def load(self, state: npt.NDArray[np.float32] | None) -> None:
        """Restore a state; None resets it to the initial scale."""
        scale, steps = (LOSS_SCALE, 0) if state is None else (float(state[0]), int(state[1]))
        self._scaler = GradScaler(self._device.type, init_scale=scale)
        self._scaler.load_state_dict({**self._scaler.state_dict(), "_growth_tracker": steps})

    @property
    def state(self) -> npt.NDArray[np.float32]:
        """Return the state."""
        state = self._scaler.state_dict()
        return np.array([state["scale"], state["_growth_tracker"]], np.float32)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide the gradients by the scale; return False and halve the scale if they overflowed.

        This waits for the device once, to read whether they did.
        """
        observed = _Gradients(optimizer)
        self._scaler.unscale_(observed)  # type: ignore[arg-type]
        self._scaler.step(observed)  # type: ignore[arg-type]
        self._scaler.update()
        return observed.are_finite


class _Gradients:
    """The part of an optimizer that GradScaler uses; it calls `step` if no gradient overflowed.

    For a fused optimizer, GradScaler would leave this decision to the kernel and not reveal it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups
        self.are_finite = False

    def step(self) -> None:
        self.are_finite = True


def autocast(
    precision: Precision, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """Return the context manager for the forward pass and the loss: torch's autocast or none."""
    if precision not in _SHORT:
        return contextlib.nullcontext()
    return torch.autocast(device.type, _SHORT[precision])


def check_precision(precision: str, device: torch.device) -> Precision:
    """Return the precision; UsageError if it is unknown or this device lacks it."""
    if precision not in PRECISIONS:
        known = ", ".join(map(repr, PRECISIONS))
        raise UsageError(f"precision = {precision!r} must be one of {known}")
    if precision in _SHORT and not is_autocast_available(device.type):
        raise UsageError(
            f'precision = "{precision}" does not work on {device.type}; use "float32" there'
        )
    if precision == "bfloat16" and device.type == "cuda":
        its = accelerator_of(str(device))
        if its.capability and not its.has_bfloat16:
            raise UsageError(
                f'precision = "bfloat16": {device} ({its.name}, {its.capability[0]}.'
                f"{its.capability[1]}) does not have it, only 8.0 and newer; use float16"
            )
    return precision


def widened(values: Tensor) -> Tensor:
    """Return values of 16 bits as float32, and others as they are."""
    return values.float() if values.dtype in _SHORT.values() else values


# --- restoring the training state


def fork_rng(*devices: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return torch's context manager that restores the generators of the CPU and these devices."""
    cards = [device for device in devices if device.type != "cpu"]
    return torch.random.fork_rng(cards, device_type=cards[0].type if cards else "cuda")


@contextlib.contextmanager
def preserve_training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore everything that training steps inside the block change, in place.

    This covers the model, the optimizer's state, the gradients, and all global random generators.
    The copies are in host memory, because the device may be out of memory.
    """
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [kept for kept in state.values() if isinstance(kept, Tensor)]
    before = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    known = set(optimizer.state)
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        with fork_rng(*{tensor.device for tensor in tensors}):
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        optimizer.zero_grad(set_to_none=True)
        for module, own in buffers:
            module._buffers.update(own)
        with torch.no_grad():
            for tensor, copied in before:
                tensor.copy_(copied)
        for parameter in set(optimizer.state) - known:
            del optimizer.state[parameter]
