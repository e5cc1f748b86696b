"""A batch in pieces, for a device on which the whole does not fit."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ..errors import UsageError


def in_pieces(batch_size: int, micro_batch_size: int) -> bool:
    """Return whether a batch of this size is computed in pieces."""
    return 0 < micro_batch_size < batch_size


def pieces_of(
    inputs: Any, targets: Any, micro_batch_size: int, dim: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of each piece, in order; they differ in size by one at most.

    Parameters
    ----------
    inputs, targets : torch.Tensor
        Of equal length along `dim`.
    micro_batch_size : int
        The most samples of a piece, >= 1.
    dim : int (default: 0)
        Along which the samples lie.

    Raises
    ------
    ValueError
        If one of both is no tensor.
    """
    for name, part in (("inputs", inputs), ("targets", targets)):
        if not isinstance(part, Tensor):
            raise ValueError(
                f"micro-batch-size = {micro_batch_size}: the {name} of a batch are a "
                f"{type(part).__name__}, and only tensors can be cut; leave it at 0"
            )
    count = -(-inputs.shape[dim] // micro_batch_size)
    yield from zip(
        torch.tensor_split(inputs, count, dim), torch.tensor_split(targets, count, dim), strict=True
    )


def dependence(model: nn.Module) -> str:
    """Return the first module through which samples of a batch change each other, in words.

    Such are BatchNorm and everything made from it, and InstanceNorm that tracks statistics, as far
    as they use those of the batch when the model trains. Empty if there is none. Modules of one's
    own that do so cannot be seen.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.train()  # it may leave some in eval mode, as where BatchNorm is frozen
    try:
        for name, module in model.named_modules():
            if _uses_batch(module):
                return f"{type(module).__name__} ({name})" if name else type(module).__name__
        return ""
    finally:
        for module, training in modes:
            module.training = training


def check_micro_batches(model: nn.Module, micro_batch_size: int) -> None:
    """Refuse pieces of a batch whose samples depend on each other.

    Parameters
    ----------
    model : torch.nn.Module
        Left as it is.
    micro_batch_size : int
        The most samples of a piece; 0: the batch stays whole.

    Raises
    ------
    UsageError
        If the model has a module of which `dependence` tells.
    """
    if micro_batch_size < 0:
        raise UsageError(f"micro-batch-size = {micro_batch_size} must be at least 0")
    if micro_batch_size == 0 or not (module := dependence(model)):
        return
    raise UsageError(
        f"micro-batch-size = {micro_batch_size}: {module} of the model takes its statistics from "
        "the whole batch, so pieces would give another result; leave it at 0 and make batch-size "
        "smaller, or use a model without BatchNorm"
    )


def added(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sums of gradients, one by one; None stands for zero."""
    return [
        one if other is None else other if one is None else one + other
        for one, other in zip(some, others, strict=True)
    ]


def _uses_batch(module: nn.Module) -> bool:
    if isinstance(module, _BatchNorm):
        return module.training or module.running_mean is None
    return isinstance(module, _InstanceNorm) and module.training and module.track_running_stats
