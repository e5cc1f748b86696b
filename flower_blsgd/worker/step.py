"""What a local step needs beside the model: an optimizer, micro-batches, a precision, a way back.

`LocalSGD` puts them together.
"""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ..errors import UsageError
from ..grids.worker_spec import PRECISIONS, Precision
from ..protocol import SLOTS

SampleLoss = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) -> one loss per sample, shape (batch_size,)."""

Augment = Callable[[Any, torch.Generator], Any]
"""(inputs of a batch, generator on their device) -> inputs."""


# --- optimizers


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    learning_rate: float | Tensor = 1.0,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer; every order brings its learning rate, see `set_learning_rate`.

    `LocalSGD` explains the settings. A `learning_rate` in a tensor is for steps that are captured:
    a number would be captured with them. `fused` steps take one kernel for all parameters; None
    leaves it to torch.

    ValueError if there is none of that name.
    """
    both: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay, "fused": fused}
    if name == "sgd":
        return torch.optim.SGD(parameters, momentum=momentum, nesterov=nesterov, **both)
    if name == "adamw":
        return torch.optim.AdamW(parameters, betas=(0.9, 0.999), **both)
    raise ValueError(f"optimizer = {name!r} must be one of {', '.join(map(repr, SLOTS))}")


def can_fuse(model: nn.Module, device: torch.device) -> bool:
    """Return whether a fused optimizer can update all parameters of a model on this device.

    On a CPU it is no faster, and rounds in another way.
    """
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    return (
        device.type == "cuda"
        and not sparse
        and all(parameter.is_floating_point() for parameter in model.parameters())
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set an optimizer's learning rate; one that is a tensor is overwritten in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


# --- micro-batches


def micro_batches(inputs: Any, targets: Any, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of each micro-batch of at most `size` samples, in order.

    They differ in size by one at most.

    UsageError if inputs or targets are no tensor.
    """
    for name, part in (("inputs", inputs), ("targets", targets)):
        if not isinstance(part, Tensor):
            raise UsageError(
                f"micro-batch-size = {size}: the {name} of a batch are a "
                f"{type(part).__name__}, and only tensors can be cut; leave it at 0"
            )
    count = -(-len(inputs) // size)
    yield from zip(
        torch.tensor_split(inputs, count), torch.tensor_split(targets, count), strict=True
    )


def check_micro_batches(model: nn.Module, size: int) -> None:
    """Refuse to cut the batch of a model whose samples depend on each other; 0 cuts nothing.

    UsageError if the model has a module such as BatchNorm, see `batch_dependent_module`.
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
    side in threads would put it back under each other; those must all have the same precision.
    """
    if torch.device(device).type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(
    precision: Precision, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """Return the context manager for the forward pass and the loss: torch's autocast, or nothing.

    With bfloat16 torch casts the inputs of matrix products and convolutions; weights stay float32,
    and so do sums and losses. Casts are not kept: one that outlives the capture of a graph would be
    of old weights.
    """
    if precision != "bfloat16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def check_precision(precision: str, device: torch.device) -> Precision:
    """Return the precision if this device can compute so.

    UsageError if there is no such precision, or not on this kind of device.
    """
    if precision not in PRECISIONS:
        known = ", ".join(map(repr, PRECISIONS))
        raise UsageError(f"precision = {precision!r} must be one of {known}")
    if precision == "bfloat16" and not torch.amp.is_autocast_available(device.type):
        raise UsageError(
            f'precision = "bfloat16" does not work on {device.type}; use "float32" there'
        )
    return precision


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
    """Return the states of the host's global generators: torch's, Python's and numpy's.

    They are equal if nothing was drawn in between.
    """
    kind, keys, *rest = np.random.get_state()
    numpys = kind, tuple(np.asarray(keys).tolist()), *rest
    return torch.random.get_rng_state().numpy().tobytes(), random.getstate(), numpys


def first_cause(error: BaseException) -> str:
    """Return what went wrong first, in one line."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
