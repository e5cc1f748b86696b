"""Train for trial, and leave no trace of it."""

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextlib.contextmanager
def rehearsal(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    copies_on: torch.device | None = None,
) -> Iterator[None]:
    """Put back what steps inside the block change, where it is.

    That is the model's parameters and buffers, the optimizer's state, the gradients, and all
    global random numbers. Tensors keep their addresses: a captured graph works on them. Where
    the model puts a new tensor in the place of a buffer, the old one comes back.

    Parameters
    ----------
    model : torch.nn.Module
        Trained inside.
    optimizer : torch.optim.Optimizer
        Whose steps they are.
    copies_on : torch.device, optional
        Where the copies wait; by default beside what they are of.
    """
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [kept for state in optimizer.state.values() for kept in _tensors_of(state)]
    before = [(tensor, _copy(tensor, copies_on)) for tensor in tensors]
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
            _put_back(module, own)
        with torch.no_grad():
            for tensor, copied in before:
                tensor.copy_(copied)
            for parameter in [p for p in optimizer.state if p not in known]:
                del optimizer.state[parameter]


def host_randomness() -> tuple[bytes, Any, Any]:
    """Return the states of the host's global generators: torch's, Python's and numpy's."""
    return torch.random.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()


def same_randomness(one: tuple[bytes, Any, Any], other: tuple[bytes, Any, Any]) -> bool:
    """Return whether nothing was drawn between two states of `host_randomness`."""
    return one[:2] == other[:2] and all(
        np.array_equal(a, b) for a, b in zip(one[2], other[2], strict=True)
    )


def _put_back(module: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    for name, buffer in buffers.items():
        if name not in module._buffers or module._buffers[name] is not buffer:
            module._buffers[name] = buffer


def _tensors_of(state: dict[str, Any]) -> list[Tensor]:
    return [kept for kept in state.values() if isinstance(kept, Tensor)]


def _copy(tensor: Tensor, device: torch.device | None) -> Tensor:
    return tensor.detach().to(device or tensor.device, copy=True)
